"""Where every tensor of a ZeRO save is at home: masters in flat vectors, and what the optimizer does not hold.

A *home* is a tensor's shape and its parts: ranges of the ranks' vectors, or one tensor stored whole. The fp32 masters are the source of
truth; the low-precision copies beside them are left to the witness. What no group holds:

    buffers                 in `module`
    frozen, ZeRO-1          in `module` and nowhere else
    frozen, ZeRO-2          whole, in `frozen_param_fragments`
    frozen, ZeRO-3          one padded piece per rank, in `frozen_param_fragments`
    aliases of tied tensors named in `shared_params` of rank 0; where an old version wrote none, by the storage they share

Refused: placeholders without elements that nothing fills, vectors that do not fit their parameters, maps of slices that contradict the
walk. Under round_robin_gradients the maps are of the order before (a fault of DeepSpeed's), and are left out.

Source: deepspeed 0.19.8, utils/zero_to_fp32.py; runtime/engine.py (`_get_zero_frozen_param_attributes`, `_get_shared_params`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from reports.errors import FormatError, name_some
from tasks.engine.containers.torch_pickle import StoredTensor
from tasks.engine.formats.zero_states import ModelStates, OptimStates, TorchFile
from tasks.engine.formats.zero_walk import REMEDY, Extent, Group, Shape, cut_pieces, walk_pieces, walk_slices

MASTER = "master"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the part of one tensor-parallel rank lies in the whole: its own shape, and what is added to an index in it."""

    shape: Shape
    shift: Shape


@dataclass(frozen=True, slots=True)
class Part:
    """Values of a home: a range of the vector `tensor`, or all of it where `extent` is None. The range counts the home's elements, or
    those of a rank's part of it where there is a `placement`.
    """

    file: TorchFile
    tensor: StoredTensor
    extent: Extent | None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Home:
    """One tensor: its shape and where its values are."""

    shape: Shape
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """One trained parameter: its flat group, the home of its master and of each of the optimizer's slots, and where its step count is."""

    group: int
    slots: Mapping[str, Home]
    step: tuple[TorchFile, StoredTensor | int | None]

    @property
    def master(self) -> Home:
        """The home of the fp32 values."""
        return self.slots[MASTER]


def trained_of_group(
    index: int, shapes: Mapping[str, Shape], ranks: Sequence[OptimStates], where: str, *, by_map: bool
) -> dict[str, Trained]:
    """Return the homes of one group's parameters.

    Args:
        index: the group's number in the optimizer files.
        shapes: its parameters, in the vector's order.
        ranks: the optimizer files that share it, in order.
        where: the files, for messages.
        by_map: whether the ranks' own maps of their slices must agree.

    Returns:
        By name.

    Raises:
        FormatError: parameters and vectors do not belong together.
    """
    first = ranks[0]
    short = [rank for rank, states in enumerate(ranks) if len(states.masters) <= index]
    if short:
        raise FormatError(
            f"the model states list {index + 1} parameter groups or more, rank {short[0]} holds {len(ranks[short[0]].masters)}",
            where=where,
            remedy=REMEDY,
        )
    vectors = [states.masters[index] for states in ranks]
    gaps = first.gaps[index] if index < len(first.gaps) else ()
    group = Group(f"parameter group {index}", shapes, gaps, [_length(vector, where) for vector in vectors])
    extents = walk_pieces(group, where) if first.sharded else walk_slices(group, where)
    if by_map:
        _hold_against_slices(index, extents, ranks, where)
    return {name: _trained(index, shape, extents[name], ranks) for name, shape in shapes.items()}


def find_frozen(ranks: Sequence[ModelStates], *, sharded: bool) -> dict[str, Home]:
    """Return the homes of frozen parameters that the model states list as such.

    Args:
        ranks: files of model states: of all ranks under ZeRO-3, else of the one that wrote.
        sharded: whether it is ZeRO-3.

    Returns:
        By name.

    Raises:
        FormatError: a rank lacks its piece, or the pieces have the wrong length.
    """
    first, found = ranks[0], {}
    for name, shape in first.frozen_shapes.items():
        lacking = [rank for rank, states in enumerate(ranks) if name not in states.frozen]
        if lacking:
            raise FormatError(f"frozen parameter {name} has no values in rank {lacking[0]}'s file", where=first.file.where, remedy=REMEDY)
        if not sharded:
            found[name] = Home(shape, (Part(first.file, first.frozen[name], None),))
            continue
        pieces = cut_pieces(prod(shape), len(ranks))
        parts = tuple(Part(ranks[piece.rank].file, ranks[piece.rank].frozen[name], piece) for piece in pieces)
        short = [part for part, piece in zip(parts, pieces, strict=True) if prod(part.tensor.shape) < piece.stop - piece.start]
        if short:
            raise FormatError(f"frozen parameter {name} has {short[0].tensor.shape} elements in this file", where=short[0].file.where)
        found[name] = Home(shape, parts)
    return found


def find_in_module(states: ModelStates, known: Mapping[str, object], aliases: Mapping[str, str]) -> dict[str, Home]:
    """Return the homes of what only `module` holds: buffers, and frozen parameters of ZeRO-1.

    Args:
        states: the model states.
        known: names that have a home already.
        aliases: names that are another tensor's.

    Returns:
        By name, in the module's order.

    Raises:
        FormatError: a placeholder without elements, for which no file holds values.
    """
    module = states.module or {}
    found, empty = {}, []
    for name, tensor in module.items():
        if name in known or name in aliases:
            continue
        if 0 in tensor.shape and name not in states.buffers:
            empty.append(name)
        found[name] = Home(tensor.shape, (Part(states.file, tensor, None),))
    if empty:
        raise FormatError(
            f"{len(empty)} parameters are placeholders without elements, and no file holds their values: {name_some(empty)}",
            where=states.file.where,
            remedy="Frozen weights were left out of this save (exclude_frozen_parameters, or a version before 0.9): take them from the"
            " base model, or export a save that has them.",
        )
    return found


def find_aliases(states: ModelStates, trained: Mapping[str, object]) -> dict[str, str]:
    """Return which names are another tensor's, as rank 0 recorded it or as shared storages show.

    Args:
        states: the model states of global rank 0.
        trained: parameters of the optimizer.

    Returns:
        Alias → the name that is stored.

    Raises:
        FormatError: an alias names a tensor that is not there, or one of another shape.
    """
    module = states.module or {}
    aliases = {alias: stored for alias, stored in states.aliases.items() if alias != stored}
    places = {_place(tensor): name for name, tensor in module.items() if name in trained and 0 not in tensor.shape}
    for name, tensor in module.items():
        if name not in trained and name not in states.buffers and 0 not in tensor.shape and _place(tensor) in places:
            aliases.setdefault(name, places[_place(tensor)])
    for alias, stored in aliases.items():
        ours, theirs = module.get(alias), module.get(stored)
        if ours is not None and theirs is not None and ours.shape != theirs.shape:
            raise FormatError(
                f"shared_params says that {alias} is {stored}, but their shapes are {ours.shape} and {theirs.shape}",
                where=states.file.where,
                remedy="This record is wrong, as versions of early 2023 wrote it; export another step.",
            )
    return aliases


def follow_aliases(aliases: Mapping[str, str], homes: Mapping[str, Home], where: str) -> Iterator[tuple[str, Home]]:
    """Yield the home of every alias: the one of the tensor it is.

    Args:
        aliases: alias → stored name.
        homes: of the stored tensors.
        where: the file, for messages.

    Yields:
        Alias, home.

    Raises:
        FormatError: the stored tensor has no home.
    """
    for alias, stored in aliases.items():
        for _ in aliases:  # an alias of an alias
            stored = aliases.get(stored, stored)
        if stored not in homes:
            raise FormatError(
                f"shared_params says that {alias} is {stored}, which the save does not hold", where=where, remedy="Export another step."
            )
        yield alias, homes[stored]


def _trained(index: int, shape: Shape, extents: tuple[Extent, ...], ranks: Sequence[OptimStates]) -> Trained:
    master = Home(shape, tuple(Part(ranks[e.rank].file, ranks[e.rank].masters[index], e) for e in extents))
    slots = {MASTER: master}
    for slot, vectors in ranks[0].slots.items():
        if vectors[index] is not None and _is_cut_alike(slot, index, ranks):
            parts = [(ranks[e.rank], _vector(ranks[e.rank], slot, index), e) for e in extents]
            slots[slot] = Home(shape, tuple(Part(states.file, vector, e) for states, vector, e in parts))
    return Trained(index, slots, (ranks[0].file, ranks[0].steps[index]))


def find_foreign(ranks: Sequence[OptimStates]) -> dict[str, Home]:
    """Return the optimizer's vectors that are not cut as the masters are, so that no file tells whose their elements are.

    Args:
        ranks: optimizer files, in the order of ranks.

    Returns:
        By a name of their own, such as Muon's `momentum_buffer` of whole parameters.
    """
    found: dict[str, Home] = {}
    for slot, vectors in ranks[0].slots.items() if ranks else ():
        for index, first in enumerate(vectors):
            if first is not None and not _is_cut_alike(slot, index, ranks):
                own = [(rank, states, _vector(states, slot, index)) for rank, states in enumerate(ranks)]
                found |= {f"{slot}.group{index}.rank{rank}": Home(v.shape, (Part(states.file, v, None),)) for rank, states, v in own}
    return found


def _is_cut_alike(slot: str, index: int, ranks: Sequence[OptimStates]) -> bool:
    # Moments keep the padding at the end that the last rank's masters may have lost; they are otherwise as long.
    lengths = [(_vector(states, slot, index).shape[0], states.masters[index].shape[0]) for states in ranks]
    last, masters_of_last = lengths[-1]
    return all(ours == masters for ours, masters in lengths[:-1]) and 0 <= last - masters_of_last < 2 * len(ranks)


def _vector(states: OptimStates, slot: str, index: int) -> StoredTensor:
    vector = states.slots[slot][index] if slot in states.slots else None
    if vector is None:
        raise FormatError(f"has no {slot} of parameter group {index}, other ranks have", where=states.file.where, remedy=REMEDY)
    return vector


def _hold_against_slices(index: int, extents: Mapping[str, tuple[Extent, ...]], ranks: Sequence[OptimStates], where: str) -> None:
    # The writer's own map of each rank's slice must agree with the walk.
    for rank, states in enumerate(ranks):
        if index >= len(states.slices):
            continue
        walked = {name: (e.stop - e.start, e.at) for name, own in extents.items() for e in own if e.rank == rank}
        recorded = {name: address for name, address in states.slices[index].items() if address[0]}
        wrong = [name for name in {**walked, **recorded} if walked.get(name) != recorded.get(name)]
        if wrong:
            raise FormatError(
                f"parameter group {index}: {wrong[0]} lies at (elements, first) {walked.get(wrong[0])} by param_shapes, but at"
                f" {recorded.get(wrong[0])} by the map of this rank; {len(wrong)} disagree",
                where=states.file.where or where,
                remedy="The files are of two saves, or were renamed: restore them, or export another step.",
            )


def _length(vector: StoredTensor, where: str) -> int:
    if len(vector.shape) != 1:
        raise FormatError(f"a flat vector has shape {vector.shape}", where=where, remedy=REMEDY)
    return vector.shape[0]


def _place(tensor: StoredTensor) -> tuple[str, int, Shape, Shape]:
    return tensor.storage.key, tensor.storage_offset, tensor.shape, tensor.strides
