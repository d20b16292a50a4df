"""Opening the checkpoint a task works on. Tasks in one process share the opened one; a task elsewhere opens it again."""

from functools import lru_cache
from pathlib import Path

from reports.errors import FormatError
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.tensors.catalog import Catalog
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.handover import SourceRef


@lru_cache(maxsize=1)
def _open(path: Path, also: tuple[Path, ...], step: int | None) -> SourceBytes:
    reader = open_checkpoint(path, also=also, step=step)
    return SourceBytes(reader, reader.catalog())


def open_afresh(ref: SourceRef) -> SourceBytes:
    """Return the checkpoint as it is now, whatever was opened before.

    Args:
        ref: which one; its digest, where it has one, must fit.

    Returns:
        Its bytes, for any number of threads.

    Raises:
        FormatError: the checkpoint changed since the run began.
    """
    _open.cache_clear()
    return opened(ref)


def opened(ref: SourceRef) -> SourceBytes:
    """Return the checkpoint, with its catalog made.

    Args:
        ref: which one; its digest, where it has one, must fit.

    Returns:
        Its bytes, for any number of threads.

    Raises:
        FormatError: the checkpoint changed since the run began.
    """
    source = _open(ref.path, ref.also, ref.step)
    if ref.digest and source.catalog.digest != ref.digest:
        raise FormatError("changed since this run began", where=source.catalog.root, remedy="Export again when nothing writes to it.")
    return source


def close_source() -> None:
    """Let go of the opened checkpoint; its files are closed when the last task that reads them ends."""
    _open.cache_clear()


def catalog_of(ref: SourceRef) -> Catalog:
    """Return the checkpoint's catalog.

    Args:
        ref: which checkpoint.

    Returns:
        The catalog.
    """
    return opened(ref).catalog
