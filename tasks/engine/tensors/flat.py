"""Ranges of a tensor's flat vector, as boxes: how trainers that keep parameters one behind the other in long vectors cut tensors.

A *flat range* [start, stop) counts a tensor's elements in C order. It is whole rows, or whole rows with a part of a row before or behind
them; a part of a row is a flat range of that row. So a range of a D-dim tensor is at most 2D - 1 boxes, each contiguous in the vector.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from tasks.engine.tensors.region import Region


@lru_cache(maxsize=1 << 16)  # the layers of a model are cut alike, and so are the moments beside the weights
def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> tuple[Region, ...]:
    """Return the boxes that a flat range is made of.

    Args:
        shape: of the whole tensor.
        start: first element.
        stop: behind the last element.

    Returns:
        Boxes with at least one element, in the vector's order; that of the whole range is the tensor itself.
    """
    return tuple(_cut(shape, start, stop))


def is_flat(region: Region, outer: Region) -> bool:
    """Return whether a region is one flat range of another, so that its values follow each other there.

    Args:
        region: a region inside `outer`.
        outer: the box whose elements are counted.

    Returns:
        Whether nothing of `outer` lies between two of its elements.
    """
    lead = next((dim for dim, length in enumerate(region.shape) if length != 1), len(region.shape))
    return region.shape[lead + 1 :] == outer.shape[lead + 1 :]


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    if start >= stop:
        return
    if not shape:
        yield Region((), ())
        return
    row_numel = prod(shape[1:])
    first, last = -(-start // row_numel), stop // row_numel  # the whole rows
    if first > last:  # a part of one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row_numel)
    if first < last:
        yield Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row_numel, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Region]:
    base = row * prod(shape[1:])
    for part in _cut(shape[1:], start - base, stop - base):
        yield Region((row, *part.offset), (1, *part.shape))
