"""Where each parameter lies in the ranks' flat vectors. Arithmetic only: no file is read.

ZeRO-1 and -2 lay the parameters of a group one behind the other, pad the end, and give each rank an equal slice: a parameter may lie in
the vectors of several ranks. ZeRO-3 cuts each parameter by itself into equal pieces, the last one padded, and a rank's vector is its
pieces one behind the other.

Masters may come without the padding at the end while the moments beside them keep it, so places are counted in whole slices.

Source: deepspeed 0.19.8, utils/zero_to_fp32.py; runtime/zero/stage_1_and_2.py (`_configure_distributed_optimizer`), stage3.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reports.errors import FormatError

Shape = tuple[int, ...]
REMEDY = "Restore the files of all ranks, of this one save, or export another step."


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [start, stop) of a parameter, from element `at` of a rank's vector."""

    rank: int
    at: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Group:
    """One flat group: its parameters in order, the unused elements behind each, and each rank's vector length (masters)."""

    name: str
    shapes: Mapping[str, Shape]
    gaps: Sequence[int]
    lengths: Sequence[int]


def walk_slices(group: Group, where: str) -> dict[str, tuple[Extent, ...]]:
    """Return where the parameters of a ZeRO-1 or -2 group lie.

    Args:
        group: the group.
        where: the files, for messages.

    Returns:
        Extents by parameter, in order; of a parameter without elements, none.

    Raises:
        FormatError: the vectors hold fewer elements than the parameters have, or more than alignment explains; or the ranks' slices
            differ in length.
    """
    world = len(group.lengths)
    part = max(group.lengths, default=0)
    if any(length != part for length in group.lengths[:-1]):
        raise FormatError(
            f"{group.name}: the ranks hold {', '.join(map(str, group.lengths))} elements, only the last may hold fewer; of two saves?",
            where=where,
            remedy=REMEDY,
        )
    gaps = list(group.gaps) or [0] * len(group.shapes)
    if len(gaps) != len(group.shapes):
        raise FormatError(f"{group.name}: {len(gaps)} alignment gaps for {len(group.shapes)} parameters", where=where, remedy=REMEDY)
    found, at = {}, 0
    for (name, shape), gap in zip(group.shapes.items(), gaps, strict=True):
        found[name] = tuple(_cut_slices(at, prod(shape), part))
        at += prod(shape) + gap
    held, used = sum(group.lengths), at - (gaps[-1] if gaps else 0)
    if held < used:
        raise FormatError(f"{group.name}: its {world} ranks hold {held} of {used} elements", where=where, remedy=REMEDY)
    if held - at >= 2 * world:
        raise FormatError(
            f"{group.name}: {held - at} elements are left over, padding of {world} ranks is less than {2 * world}",
            where=where,
            remedy=REMEDY,
        )
    return found


def walk_pieces(group: Group, where: str) -> dict[str, tuple[Extent, ...]]:
    """Return where the parameters of a ZeRO-3 sub-group lie.

    Args:
        group: the sub-group; without gaps.
        where: the files, for messages.

    Returns:
        Extents by parameter, in order.

    Raises:
        FormatError: a rank's vector is not as long as the parameters' pieces.
    """
    world = len(group.lengths)
    found, at = {}, 0
    for name, shape in group.shapes.items():
        found[name] = tuple(cut_pieces(prod(shape), world, at))
        at += -(-prod(shape) // world)
    wrong = [rank for rank, length in enumerate(group.lengths) if length != at]
    if wrong:
        raise FormatError(
            f"{group.name}: rank {wrong[0]} holds {group.lengths[wrong[0]]} elements, its parameters' pieces are {at}",
            where=where,
            remedy=REMEDY,
        )
    return found


def cut_pieces(numel: int, world: int, at: int = 0) -> list[Extent]:
    """Return the pieces of one ZeRO-3 parameter.

    Args:
        numel: its elements.
        world: how many ranks share it.
        at: where its piece begins in every rank's vector.

    Returns:
        One extent per rank that holds elements; the last ranks may hold only padding.
    """
    part = -(-numel // world)
    return [Extent(rank, at, rank * part, min(numel, (rank + 1) * part)) for rank in range(world) if rank * part < numel]


def _cut_slices(first: int, numel: int, part: int) -> list[Extent]:
    found, at = [], first
    while at < first + numel and part:
        rank = at // part
        stop = min(first + numel, (rank + 1) * part)
        found.append(Extent(rank, at - rank * part, at - first, stop - first))
        at = stop
    return found
