"""The checkpoint a run works on. Tasks in one process share the opened one; a task elsewhere opens it again and compares digests."""

from dataclasses import replace
from pathlib import Path
from threading import Lock

from reports.errors import FormatError, RequestError
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.masters import take_masters
from tasks.engine.tensors.catalog import MASTER, Catalog
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.handover import SourceRef

_latest: dict[SourceRef, SourceBytes] = {}  # at most one: the checkpoint that this process opened last, by its ref with the digest
_lock = Lock()


def open_source(ref: SourceRef) -> tuple[SourceRef, SourceBytes]:
    """Open a checkpoint as it is now.

    Args:
        ref: which one; its digest is ignored.

    Returns:
        The ref with the digest of what was found, and the checkpoint's bytes.

    Raises:
        FormatError: not a checkpoint, or an incomplete one.
        RequestError: one of `ref.also` holds nothing of it, or masters are asked for that are not there.
    """
    reader = open_checkpoint(ref.path, also=ref.also, step=ref.step, tag=ref.tag)
    catalog = take_masters(reader.catalog()) if ref.weights == MASTER else reader.catalog()
    known, source = replace(ref, digest=catalog.digest), SourceBytes(reader, catalog)
    _refuse_idle_roots(ref, catalog)
    close_source()
    with _lock:
        _latest[known] = source
    return known, source


def _refuse_idle_roots(ref: SourceRef, catalog: Catalog) -> None:
    names = [*catalog.table.files, *(place.path for item in catalog.state for place in item.places)]
    used = [Path(catalog.root, name) for name in names]
    for root in ref.also:
        if not any(path.is_relative_to(root) for path in used):
            raise RequestError(
                "holds nothing of this save", where=f"--also {root}", remedy="Name the folder on that node's disk, or leave it out."
            )


def opened(ref: SourceRef) -> SourceBytes:
    """Return the checkpoint that a run has opened.

    Args:
        ref: which one, with its digest.

    Returns:
        Its bytes, for any number of threads.

    Raises:
        FormatError: the checkpoint changed since the run began.
    """
    with _lock:
        source = _latest.get(ref)
    if source is not None:
        return source
    found, source = open_source(ref)
    if found.digest != ref.digest:
        raise FormatError("changed since this run began", where=source.catalog.root, remedy="Export again when nothing writes to it.")
    return source


def reopened(ref: SourceRef) -> SourceBytes:
    """Open a run's checkpoint once more, to see that it is still the same.

    Args:
        ref: which one, with its digest.

    Returns:
        Its bytes.

    Raises:
        FormatError: the checkpoint changed since the run began.
    """
    close_source()
    return opened(ref)


def close_source() -> None:
    """Let go of the checkpoint that was opened last, and close its files."""
    with _lock:
        for source in _latest.values():
            source.files.close()
        _latest.clear()
