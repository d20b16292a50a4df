"""Boxes of elements, and the proof that boxes tile a tensor.

A *region* is a box in a tensor: per dim an offset and a length, in elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from reports.errors import CoverageError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """A box: elements offset[d] … offset[d]+shape[d]-1 on each dim d. A 0-d tensor's region has no dims and one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Region":
        """Return the region that is all of a tensor.

        Args:
            shape: the tensor's shape.

        Returns:
            Offset zero, that shape.
        """
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Per dim, the first index behind the box."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: "Region") -> "Region | None":
        """Return the elements both have, or None.

        Args:
            other: a region of the same tensor.

        Returns:
            A region with at least one element, or None.
        """
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def moved(self, by: tuple[int, ...]) -> "Region":
        """Return the box that lies `by` further.

        Args:
            by: elements per dim.

        Returns:
            A region of the same shape.
        """
        return Region(tuple(o + step for o, step in zip(self.offset, by, strict=True)), self.shape)

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the slices that cut this region out of `outer`'s array.

        Args:
            outer: a region that covers this one.

        Returns:
            One slice per dim.
        """
        return tuple(slice(o - base, o - base + n) for o, base, n in zip(self.offset, outer.offset, self.shape, strict=True))

    def rows(self, shape: Sequence[int]) -> str:
        """Return where the box lies, for messages: `rows 25-49` where it is whole behind dim 0, else `[25:50, 0:64]`.

        Args:
            shape: of the tensor.

        Returns:
            A few words.
        """
        if self.shape and tuple(self.shape[1:]) == tuple(shape[1:]):
            return f"rows {self.offset[0]}-{self.stop[0] - 1}"
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop, strict=True)) + "]"


def check_tiling(fqn: str, shape: Sequence[int], offsets: Ints, shapes: Ints, *, remedy: str = "") -> None:
    """Prove that boxes tile a tensor: every element in exactly one box.

    Args:
        fqn: the tensor, for the message.
        shape: (D,), its shape.
        offsets: (N, D) first index of each box, per dim.
        shapes: (N, D) length of each box, per dim. Boxes without elements are ignored.
        remedy: what the message should advise.

    Raises:
        CoverageError: a box leaves the tensor, two boxes overlap, or some element is in none. The message names the first such box.
    """
    total = np.asarray(shape, dtype=np.int64)
    keep = (shapes > 0).all(axis=1)
    starts, stops = offsets[keep], offsets[keep] + shapes[keep]
    outside = (starts < 0).any(axis=1) | (stops > total).any(axis=1)
    if outside.any():
        first = _box(starts, stops, int(outside.argmax()))
        raise CoverageError(f"{first.rows(shape)} lie outside shape {tuple(shape)}", where=fqn, remedy=remedy)
    if _is_one_row_of_boxes(starts, stops, total) or _are_flat_ranges(starts, stops, total):
        return
    fault = _find_fault(starts, stops, total)
    if fault is not None:
        region, times = fault
        problem = "are in no shard" if times == 0 else f"are in {times} shards"
        raise CoverageError(f"{region.rows(shape)} of {tuple(shape)} {problem}", where=fqn, remedy=remedy)


def _is_one_row_of_boxes(starts: Ints, stops: Ints, total: Ints) -> bool:
    # The usual case, cut on one dim only: each box begins where the one before ends.
    cut = np.flatnonzero(((starts != 0) | (stops != total)).any(axis=0))
    if len(starts) == 0 or len(cut) > 1:
        return False
    if len(cut) == 0:
        return len(starts) == 1
    (dim,) = cut
    order = np.argsort(starts[:, dim])
    lows, highs = starts[order, dim], stops[order, dim]
    return bool(lows[0] == 0 and highs[-1] == total[dim] and (lows[1:] == highs[:-1]).all())


def _are_flat_ranges(starts: Ints, stops: Ints, total: Ints) -> bool:
    # The other usual case: each box is one run of the tensor's elements in C order, and begins where the one before ends.
    lengths, ndim = stops - starts, len(total)
    if len(starts) == 0 or ndim == 0:
        return False
    leads = (((lengths[:, :d] == 1).all(axis=1)) & ((lengths[:, d + 1 :] == total[d + 1 :]).all(axis=1)) for d in range(ndim))
    if not np.any(list(leads), axis=0).all():
        return False
    steps = np.concatenate([np.cumprod(total[:0:-1])[::-1], [1]]).astype(np.int64)
    first, numel = starts @ steps, lengths.prod(axis=1)
    order = np.argsort(first)
    lows, highs = first[order], (first + numel)[order]
    return bool(lows[0] == 0 and highs[-1] == total.prod() and (lows[1:] == highs[:-1]).all())


def _find_fault(starts: Ints, stops: Ints, total: Ints) -> tuple[Region, int] | None:
    # The first cell that is not in exactly one box, and in how many it is. Slab by slab along dim 0, so that memory follows the number
    # of boxes and not the grid that their edges span.
    if len(total) == 0:
        return None if len(starts) == 1 else (Region((), ()), len(starts))
    edges = np.unique(np.concatenate([starts[:, 0], stops[:, 0], [0, total[0]]])).tolist()
    for low, high in pairwise(edges):
        crossing = (starts[:, 0] <= low) & (stops[:, 0] >= high)
        fault = _find_fault(starts[crossing, 1:], stops[crossing, 1:], total[1:])
        if fault is not None:
            region, times = fault
            return Region((low, *region.offset), (high - low, *region.shape)), times
    return None


def _box(starts: Ints, stops: Ints, index: int) -> Region:
    offset = tuple(int(n) for n in starts[index])
    return Region(offset, tuple(int(b) - a for a, b in zip(offset, stops[index], strict=True)))
