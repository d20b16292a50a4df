"""Optimizer tensors of Megatron Core 0.14 and before (`fully_sharded_model_space`), which torch_dist stores in a shape of their own.

Such a tensor has shape (f_0, …, f_n, m): the whole is cut into f_i equal parts on each dim i, and every part is a flat vector of m
elements, of which a chunk holds a range. `mcore_data` of `.metadata` keeps the whole's shape.

Source: Megatron-LM core 0.14, megatron/core/dist_checkpointing/strategies/resharding.py.
"""

from collections.abc import Iterator
from math import prod

from tasks.engine.formats.dcp_metadata import DcpMetadata, Offset, SavedTensor
from tasks.engine.tensors.flat import boxes_of_range
from tasks.engine.tensors.region import Region

_ORIGINAL = "nd_reformulated_orig_global_shape"


def original_shape(metadata: DcpMetadata, item: SavedTensor) -> tuple[int, ...] | None:
    """Return the shape of the whole that an item holds in fragments.

    Args:
        metadata: the save's.
        item: one of its tensors.

    Returns:
        The shape; None where the item is not stored so, or in a way that does not divide.
    """
    kept = metadata.field("mcore_data")
    entry = kept.get(item.key) if isinstance(kept, dict) else None
    shape = entry.get(_ORIGINAL) if isinstance(entry, dict) else None
    if not isinstance(shape, tuple) or not all(type(n) is int for n in shape) or len(item.shape) != len(shape) + 1:
        return None
    cuts = item.shape[:-1]
    divides = all(cut and n % cut == 0 for n, cut in zip(shape, cuts, strict=True)) and prod(shape) == prod(item.shape)
    single = all(extent == 1 for _, box in item.chunks for extent in box[:-1])
    return shape if divides and single else None


def boxes_of_fragment(whole: tuple[int, ...], cuts: tuple[int, ...], offset: Offset, length: int) -> Iterator[tuple[Region, int]]:
    """Yield the boxes of the whole that one chunk holds.

    Args:
        whole: the whole tensor's shape.
        cuts: parts per dim.
        offset: the chunk's: which part per dim, and its first element in that part's flat vector.
        length: its elements.

    Yields:
        A box, and the chunk's element at which it begins.
    """
    part = tuple(n // cut for n, cut in zip(whole, cuts, strict=True))
    corner = tuple(index * n for index, n in zip(offset[:-1], part, strict=True))
    element = 0
    for box in boxes_of_range(part, offset[-1], offset[-1] + length):
        yield Region(tuple(a + b for a, b in zip(corner, box.offset, strict=True)), box.shape), element
        element += box.numel
