"""Opening the checkpoint a task works on. Tasks in one process share the opened one; a task elsewhere opens it again."""

from functools import lru_cache

from reports.errors import FormatError
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.tensors.catalog import Catalog
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.handover import SourceRef


@lru_cache(maxsize=1)
def opened(ref: SourceRef) -> SourceBytes:
    """Return the checkpoint, with its catalog made.

    Args:
        ref: which one; its digest must still fit.

    Returns:
        Its bytes, for any number of threads.

    Raises:
        FormatError: the checkpoint changed since the run began.
    """
    reader = open_checkpoint(ref.path, also=ref.also, step=ref.step)
    catalog = reader.catalog()
    if ref.digest and catalog.digest != ref.digest:
        raise FormatError("changed since this run began", where=catalog.root, remedy="Export again when nothing writes to it.")
    return SourceBytes(reader, catalog)


def catalog_of(ref: SourceRef) -> Catalog:
    """Return the checkpoint's catalog.

    Args:
        ref: which checkpoint.

    Returns:
        The catalog.
    """
    return opened(ref).catalog
