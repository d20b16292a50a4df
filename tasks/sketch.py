"""What is kept of a tensor's values beside its statistics: a sample to compare it with its siblings, and which rows repeat.

A *sample* is the values at SAMPLE_NUMEL flat positions that depend on the number of elements only, so that tensors of one shape are
sampled alike. *Rows* are those of a 2-D tensor; each is known by a 64-bit hash of its bits, and by whether all of it is zero. Both are
filled box by box, in any order, and take memory that grows with the rows alone.
"""

from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from tasks.witnesses.boxes import Box, Ints
from validators.sampled import SAMPLE_NUMEL, ZERO_ROW, Run, format_runs

_SEED = 20_011  # of the positions and the hash: any number, but always the same


class Sample:
    """The sample of one tensor, or the samples of its slices along dim 0.

    Args:
        shape: the whole tensor's.
        slices: 1, or the length of dim 0.
    """

    def __init__(self, shape: Ints, slices: int = 1) -> None:
        inner = prod(shape) // slices
        starts = np.arange(slices)[:, None] * inner
        self._shape, self._flat = shape, (starts + _flat_positions(inner)).reshape(-1)
        self._bytes: npt.NDArray[np.uint8] | None = None

    def add(self, values: torch.Tensor, box: Box) -> None:
        """Take what falls into one box.

        Args:
            values: of the box, contiguous.
            box: where in the tensor it lies.
        """
        raw = values.reshape(-1).view(torch.uint8).numpy().reshape(-1, values.element_size())
        if self._bytes is None:
            self._bytes = np.zeros((len(self._flat), raw.shape[1]), np.uint8)
        run = box.flat_range(self._shape)
        if run is not None:
            inside = np.flatnonzero((self._flat >= run.start) & (self._flat < run.stop))
            self._bytes[inside] = raw[self._flat[inside] - run.start]
            return
        places = np.stack(np.unravel_index(self._flat, self._shape)) - np.array(box.offset)[:, None]
        inside = np.flatnonzero(((places >= 0) & (places < np.array(box.shape)[:, None])).all(0))
        if len(inside):
            self._bytes[inside] = raw[np.ravel_multi_index(tuple(places[:, inside]), box.shape)]

    @property
    def text(self) -> str:
        """The bytes of the sampled values in hex, little-endian; empty when no value was added."""
        return "" if self._bytes is None else self._bytes.tobytes().hex()


class Rows:
    """The rows of one matrix.

    Args:
        shape: (R, C).
    """

    def __init__(self, shape: Ints) -> None:
        self._columns = shape[1]
        self._hashes = np.zeros(shape[0], np.uint64)
        self._zero_columns = np.zeros(shape[0], np.int64)
        self._factors: dict[int, npt.NDArray[np.uint64]] = {}

    def add(self, values: torch.Tensor, box: Box, zeros: int) -> None:
        """Add one box.

        Args:
            values: of the box, contiguous.
            box: where in the tensor it lies.
            zeros: how many of the values are zero.
        """
        rows = slice(box.offset[0], box.offset[0] + box.shape[0])
        first, nbytes = box.offset[1] * values.element_size(), box.shape[1] * values.element_size()
        width = 8 if first % 8 == 0 and nbytes % 8 == 0 else values.element_size()
        raw = values.reshape(-1).view(torch.uint8).numpy()
        words = raw.view(np.dtype(f"u{width}")).reshape(box.shape[0], -1).astype(np.uint64, copy=False)
        factors = self._factors_of(width, values.element_size())[first // width : (first + nbytes) // width]
        mixed = np.right_shift(words, np.uint64(32))  # else high bits, as of signs, would meet no other bit
        mixed ^= words
        self._hashes[rows] += np.einsum("rc,c->r", mixed, factors)
        if zeros >= box.shape[1]:  # else no row of the box is zero throughout
            self._zero_columns[rows] += (values == 0).sum(1).numpy()

    def _factors_of(self, width: int, itemsize: int) -> npt.NDArray[np.uint64]:
        if width not in self._factors:
            count = -(-self._columns * itemsize // width)
            self._factors[width] = np.random.default_rng(_SEED).integers(0, 2**64, count, dtype=np.uint64) | np.uint64(1)
        return self._factors[width]

    @property
    def text(self) -> str:
        """The runs of rows that are zero, or bit-equal to an earlier one, as `validators.sampled` writes them."""
        _, first, inverse = np.unique(self._hashes, return_index=True, return_inverse=True)
        origin = np.where(self._zero_columns == self._columns, ZERO_ROW, first[inverse])
        repeated = np.flatnonzero(origin != np.arange(len(origin)))
        return format_runs(_runs(repeated.tolist(), origin[repeated].tolist()))


@lru_cache(maxsize=256)
def _flat_positions(numel: int) -> npt.NDArray[np.int64]:
    return np.arange(numel) if numel <= SAMPLE_NUMEL else np.random.default_rng(_SEED).integers(0, numel, SAMPLE_NUMEL)


def _runs(rows: list[int], origins: list[int]) -> list[Run]:
    # Rows ascending, and the row each equals; a run's origins stay where they are, or advance with its rows.
    runs: list[Run] = []
    for row, origin in zip(rows, origins, strict=True):
        last = runs[-1] if runs else None
        follows = last is not None and last.stop == row
        if last is not None and follows and last.count == 1 and origin - last.origin in (0, 1) and (last.origin, origin) != (ZERO_ROW, 0):
            runs[-1] = Run(last.start, row + 1, last.origin, origin - last.origin)
        elif last is not None and follows and last.count > 1 and origin == last.origin + last.step * last.count:
            runs[-1] = Run(last.start, row + 1, last.origin, last.step)
        else:
            runs.append(Run(row, row + 1, origin, 0))
    return runs
