"""Boxes of stored tensors, for witnesses: where they meet, how they are cut into small pieces, and how they are read.

A *box* is an offset and a shape, in elements. Nothing here is shared with the engine on purpose: what judges must not reuse the code of
what it judges.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
import torch

from reports.errors import FormatError

Ints = tuple[int, ...]
ReadBox = Callable[[Ints, Ints], torch.Tensor]  # (offset in the stored box, shape) → values

_SPAN_NBYTES = 8 << 20  # of a box with gaps, no more than this is read at once
_GAP_NBYTES = 64 << 10  # reading over a smaller gap costs less than another call


@dataclass(frozen=True, slots=True)
class Box:
    """Elements offset[d] … offset[d]+shape[d]-1 on each dim d."""

    offset: Ints
    shape: Ints

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """Return the elements both boxes hold, or None.

        Args:
            other: a box of the same tensor.

        Returns:
            A box with at least one element, or None.
        """
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def flat_range(self, shape: Ints) -> range | None:
        """Return which elements of its tensor the box holds, counted in C order, or None when it leaves some out in between.

        Args:
            shape: the tensor's.

        Returns:
            A range as long as the box.
        """
        dim = next((d for d, n in enumerate(self.shape) if n > 1), len(shape))
        if self.shape[dim + 1 :] != shape[dim + 1 :]:
            return None
        start = sum(o * prod(shape[d + 1 :]) for d, o in enumerate(self.offset))
        return range(start, start + self.numel)

    def cut(self, max_numel: int) -> Iterator["Box"]:
        """Yield boxes of at most `max_numel` elements that tile this one, in C order.

        Args:
            max_numel: 1 or more.

        Yields:
            Boxes in the coordinates of this box's tensor.
        """
        if self.numel <= max_numel:
            if self.numel:
                yield self
            return
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        step = max(1, max_numel // prod(self.shape[dim + 1 :]))
        for at in range(0, self.shape[dim], step):
            offset = (*self.offset[:dim], self.offset[dim] + at, *self.offset[dim + 1 :])
            shape = (*self.shape[:dim], min(step, self.shape[dim] - at), *self.shape[dim + 1 :])
            yield from Box(offset, shape).cut(max_numel)


class StoredBox(Protocol):
    """One box of a source tensor, where it is stored. `box` is in elements of the whole tensor."""

    @property
    def box(self) -> Box:
        """Which elements are stored."""

    def open(self) -> AbstractContextManager[ReadBox]:
        """Open the file; the function inside reads any part, `offset` counted from this box's own corner.

        Returns:
            A context manager that gives the function.
        """


def flat_boxes(shape: Ints, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that hold the elements [start, stop) of a tensor, counted in C order; each is the largest that fits there.

    Args:
        shape: of the whole tensor.
        start: first element.
        stop: behind the last.

    Yields:
        A box, and the number of its first element.
    """
    blocks = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        index = tuple(int(i) for i in np.unravel_index(start, shape)) if shape else ()
        dim = next((d for d, block in enumerate(blocks) if start % block == 0 and start + block <= stop), None)
        if dim is None:
            yield Box((), ()), start
            return
        count = min((stop - start) // blocks[dim], shape[dim] - index[dim])
        yield Box((*index[: dim + 1], *(0 for _ in shape[dim + 1 :])), (*(1 for _ in shape[:dim]), count, *shape[dim + 1 :])), start
        start += count * blocks[dim]


def refuse_outside(path: str, where: str) -> None:
    """Refuse a path found inside a checkpoint that leaves it.

    Args:
        path: relative to the checkpoint, as its files say.
        where: what says so, for the message.

    Raises:
        FormatError: absolute, or with a `..` in it.
    """
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise FormatError(f"points outside the checkpoint, to {path}", where=where)


def overlaps(boxes: list[Box]) -> bool:
    """Say whether two of the boxes share an element.

    Args:
        boxes: boxes of one tensor, none of them empty.

    Returns:
        True if any two meet.
    """
    if len(boxes) < 2 or not boxes[0].shape:
        return len(boxes) > 1
    low = np.array([box.offset for box in boxes])
    low, shape = (a[np.argsort(low[:, 0], kind="stable")] for a in (low, np.array([box.shape for box in boxes])))
    high = low + shape
    reach = np.searchsorted(low[:, 0], high[:, 0])  # boxes from here on begin behind this one
    return any(
        bool(((low[i + 1 : stop] < high[i]) & (low[i] < high[i + 1 : stop])).all(axis=1).any())
        for i, stop in enumerate(reach.tolist())
        if stop > i + 1
    )


def read_box(fd: int, path: Path, start: int, dtype: torch.dtype, full_shape: Ints, box: Box) -> torch.Tensor:
    """Read one box of a tensor that is stored in C order.

    Args:
        fd: the open file.
        path: its name, for messages.
        start: byte where the tensor's first element lies.
        dtype: of the elements, little-endian.
        full_shape: the stored tensor's shape.
        box: which elements.

    Returns:
        The values, shape `box.shape`, in memory of their own; not always contiguous.

    Raises:
        FormatError: the file ends inside the box.
    """
    if box.numel == 0:
        return torch.empty(box.shape, dtype=dtype)
    strides = tuple(prod(full_shape[d + 1 :]) for d in range(len(full_shape)))
    first = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    spans = [(n - 1) * s for n, s in zip(box.shape, strides, strict=True)]
    span = 1 + sum(spans)
    dim = next((d for d, n in enumerate(box.shape) if n > 1), 0)
    gap = (strides[dim] - (span - spans[dim])) * dtype.itemsize if span > 1 else 0
    if span == box.numel or (span * dtype.itemsize <= _SPAN_NBYTES and gap <= _GAP_NBYTES):
        raw = read_bytes(fd, path, start + first * dtype.itemsize, span * dtype.itemsize)
        return raw.view(dtype).as_strided(box.shape, strides)
    step = max(1, _SPAN_NBYTES // (strides[dim] * dtype.itemsize)) if gap <= _GAP_NBYTES else 1
    bands = [(at, min(step, box.shape[dim] - at)) for at in range(0, box.shape[dim], step)]
    parts = [
        Box((*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :]), (*box.shape[:dim], n, *box.shape[dim + 1 :]))
        for at, n in bands
    ]
    return torch.cat([read_box(fd, path, start, dtype, full_shape, part) for part in parts], dim)


def read_bytes(fd: int, path: Path, start: int, nbytes: int) -> torch.Tensor:
    """Read bytes of an open file.

    Args:
        fd: the open file.
        path: its name, for messages.
        start: first byte.
        nbytes: how many.

    Returns:
        (nbytes,) uint8, in memory of its own.

    Raises:
        FormatError: the file ends before.
    """
    raw = torch.empty(nbytes, dtype=torch.uint8)
    view, done = memoryview(raw.numpy().data), 0
    while done < nbytes:
        got = os.preadv(fd, [view[done:]], start + done)
        if got == 0:
            raise FormatError(
                f"ends at byte {start + done}, {nbytes - done} bytes too early", where=str(path), remedy="Restore the file and run again."
            )
        done += got
    return raw
