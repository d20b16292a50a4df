"""Proof that what is stored twice is the same: tied copies left out of a release, and regions that several ranks wrote."""

from collections.abc import Iterator
from math import prod

import numpy as np

from reports.errors import ReplicaError
from tasks.engine.planning.plan import Alias, ExportPlan, Input
from tasks.engine.tensors.ops import Raw
from tasks.engine.writing.source_bytes import SourceBytes
from validators.expectation import ITEMSIZE

BAND_NBYTES = 2 << 20


def check_replicas(plan: ExportPlan, source: SourceBytes) -> int:
    """Compare every alias with the tensor it must equal, and every replica with the fragment it repeats, bit for bit.

    Args:
        plan: its aliases are compared.
        source: the checkpoint.

    Returns:
        Bytes compared.

    Raises:
        ReplicaError: values differ; the message names both places and the first differing rows.
    """
    shapes = {box.name: box.full_shape for _, tensor in plan.tensors() for box in tensor.inputs}
    compared = 0
    for alias in plan.aliases:
        shape = shapes[alias.of]
        kept = _whole(alias.of, shape, source)
        copy = _whole(alias.name, shape, source)
        if kept.dtype != copy.dtype:
            raise _drifted(alias, f"is {copy.dtype}, but {alias.of} is {kept.dtype}; {alias.because}")
        for start, left, right in _bands(kept, copy, source):
            if not np.array_equal(left, right):
                row = start + int(np.argwhere((left != right).reshape(left.shape[0], -1).any(axis=1))[0, 0])
                raise _drifted(alias, f"row {row} differs from {alias.of}, yet {alias.because}")
            compared += left.nbytes
    return compared + check_copies(source)


_TIED_REMEDY = (
    "If the head was trained apart, set tie_word_embeddings to false in the config given with --assets; else export another step."
)


def _drifted(alias: Alias, what: str) -> ReplicaError:
    return ReplicaError(what, where=alias.name, remedy=_TIED_REMEDY, code="source.tied-copy-differs")


def _whole(name: str, shape: tuple[int, ...], source: SourceBytes) -> Input:
    return Input(name, (0,) * len(shape), shape, source.catalog.tensors[name].dtype, shape)


def _bands(first: Input, second: Input, source: SourceBytes) -> Iterator[tuple[int, Raw, Raw]]:
    rows = max(1, BAND_NBYTES // max(1, prod(first.shape[1:]) * ITEMSIZE[first.dtype]))
    for start in range(0, first.shape[0], rows):
        band = range(start, min(start + rows, first.shape[0]))
        yield start, source.read_rows(first, 0, band, []), source.read_rows(second, 0, band, [])


def check_copies(source: SourceBytes) -> int:
    """Compare every replica with the fragment it repeats, bit for bit.

    Args:
        source: the checkpoint.

    Returns:
        Bytes compared.

    Raises:
        ReplicaError: values differ; the message names both places.
    """
    compared = 0
    for replica in source.catalog.replicas:
        box = Input(replica.fqn, replica.region.offset, replica.region.shape, replica.dtype, replica.region.stop)
        kept = source.read_rows(box, 0, range(replica.region.shape[0] if replica.region.shape else 1), [])
        copy = source.read_fragment(replica)
        shape = source.catalog.tensors[replica.fqn].shape or replica.region.stop
        if not np.array_equal(kept.reshape(copy.shape), copy):
            other = source.overlapping(box.name, box.region)[0]
            raise ReplicaError(
                f"{replica.region.rows(shape)} differ between {replica.locator.path} and {other.locator.path}",
                where=replica.fqn,
                remedy="These ranks held different values when they saved; export another step.",
                code="source.replicas-differ",
            )
        compared += copy.nbytes
    return compared
