"""Ranges of a tensor's flat vector, as boxes: how trainers that keep parameters one behind the other in long vectors cut tensors.

A *flat range* [start, stop) counts a tensor's elements in C order. It is whole rows, or whole rows with a part of a row before or behind
them; a part of a row is a flat range of that row. So a range of a D-dim tensor is at most 2D - 1 boxes, each contiguous in the vector.
"""

from collections.abc import Iterator
from math import prod

from tasks.engine.tensors.region import Region


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes that a flat range is made of, in the vector's order.

    Args:
        shape: of the whole tensor.
        start: first element.
        stop: behind the last element.

    Yields:
        Boxes with at least one element; those of the whole range are the tensor itself.
    """
    if start >= stop:
        return
    if not shape:
        yield Region((), ())
        return
    row_numel = prod(shape[1:])
    if start % row_numel == 0 and stop % row_numel == 0:
        first = start // row_numel
        yield Region((first, *(0 for _ in shape[1:])), (stop // row_numel - first, *shape[1:]))
        return
    first, last = -(-start // row_numel), stop // row_numel  # the whole rows
    if first > last:  # a part of one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row_numel)
    yield from boxes_of_range(shape, first * row_numel, last * row_numel)
    yield from _in_row(shape, last, last * row_numel, stop)


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


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Region]:
    base = row * prod(shape[1:])
    for part in boxes_of_range(shape[1:], start - base, stop - base):
        yield Region((row, *part.offset), (1, *part.shape))
