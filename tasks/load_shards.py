"""Open a checkpoint and list what it holds. Reads metadata only."""

from pathlib import Path

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.tensors.catalog import Catalog
from tasks.handover import Loaded, SourceRef
from tasks.moments import find_moment
from tasks.retrying import RETRIES
from tasks.sources import open_source
from validators.tables import SourceTable, format_shape, write_table


@task(name="load shards", cache_policy=NO_CACHE, **RETRIES)
def load_shards(ref: SourceRef, folder: Path) -> Loaded:
    """List a checkpoint's tensors and training state.

    Args:
        ref: the checkpoint; its digest is empty.
        folder: the run folder, for the table.

    Returns:
        What was found, with the digest filled in.
    """
    known, source = open_source(ref)
    catalog = source.catalog
    moment, notes = find_moment(catalog, source.payload)
    table = write_table(SourceTable, _source_table(catalog), folder / "source.csv")
    return Loaded(
        known,
        catalog.format,
        moment,
        (Path(catalog.root), *ref.also),
        table,
        len(catalog.tensors),
        catalog.num_state_items,
        sum(t.nbytes for t in catalog.tensors.values()) or catalog.files_nbytes,
        (*catalog.notes, *notes),
    )


def _source_table(catalog: Catalog) -> pd.DataFrame:
    rows = [(name, "model", t.dtype, format_shape(t.shape or ()), t.last - t.first) for name, t in catalog.tensors.items()]
    rows += [(key, "state", t.dtype, format_shape(t.shape or ()), t.last - t.first) for key, t in catalog.state_tensors.items()]
    rows += [(s.fqn, "state", s.dtype, format_shape(s.shape), 1) for s in catalog.state]
    return pd.DataFrame(rows, columns=["name", "role", "dtype", "shape", "fragments"])
