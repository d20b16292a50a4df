"""Boxes of elements, and the proof that boxes tile a tensor.

A *region* is a box in a tensor: per dim an offset and a length, in elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the slices that cut this region out of `outer`'s array.

        Args:
            outer: a region that covers this one.

        Returns:
            One slice per dim.
        """
        return tuple(slice(o - base, o - base + n) for o, base, n in zip(self.offset, outer.offset, self.shape, strict=True))

    def rows(self) -> str:
        """Return where the box lies, for messages: `rows 25-49` or `[25:50, 0:64]`."""
        if len(self.shape) == 1 or (self.shape and not any(self.offset[1:])):
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
        raise CoverageError(f"{first.rows()} lie outside shape {tuple(shape)}", where=fqn, remedy=remedy)
    if len(starts) == 1 and (starts == 0).all() and (stops == total).all():
        return
    edges = [np.unique(np.concatenate([starts[:, d], stops[:, d], [0, total[d]]])) for d in range(len(total))]
    counts = np.zeros([max(len(edge) - 1, 0) for edge in edges], dtype=np.int32)
    lows = [np.searchsorted(edge, starts[:, d]) for d, edge in enumerate(edges)]
    highs = [np.searchsorted(edge, stops[:, d]) for d, edge in enumerate(edges)]
    for box in range(len(starts)):
        counts[tuple(slice(low[box], high[box]) for low, high in zip(lows, highs, strict=True))] += 1
    wrong = np.argwhere(counts != 1)
    if len(wrong) == 0:
        return
    cell = tuple(int(i) for i in wrong[0])
    offset = tuple(int(edge[i]) for edge, i in zip(edges, cell, strict=True))
    extent = tuple(int(edge[i + 1] - edge[i]) for edge, i in zip(edges, cell, strict=True))
    times = int(counts[cell])
    problem = "are in no shard" if times == 0 else f"are in {times} shards"
    raise CoverageError(f"{Region(offset, extent).rows()} of {tuple(shape)} {problem}", where=fqn, remedy=remedy)


def _box(starts: Ints, stops: Ints, index: int) -> Region:
    offset = tuple(int(n) for n in starts[index])
    return Region(offset, tuple(int(b) - a for a, b in zip(offset, stops[index], strict=True)))
