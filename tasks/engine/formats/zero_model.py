"""One model out of a save's files: dense, pipeline stages, native experts.

    dense       every parameter is in the groups of the one mp rank
    pipeline    each stage has its own groups; a tied module has a copy in every stage that uses it, and the copies must be equal
    experts     a group that fewer ranks share than there are is a group of experts: rank r trains those of expert-parallel rank r % ep, and
                the names in it count that rank's experts, so the global expert is ep_rank * local experts + local expert
    tensor      the mp ranks of a stage each hold a part of every parameter, see zero_joins

Refused: tensor parallelism where nobody says how the parts join.

Source: deepspeed 0.19.8, utils/groups.py (expert groups are of consecutive ranks), moe/experts.py, runtime/pipe/module.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reports.errors import FormatError
from tasks.engine.containers.torch_pickle import collect_tensors, is_tensor
from tasks.engine.formats.zero_files import INFO_FILE, WeightFile, ZeroFiles
from tasks.engine.formats.zero_homes import (
    MASTER,
    Home,
    Part,
    Trained,
    find_aliases,
    find_foreign,
    find_frozen,
    find_in_module,
    follow_aliases,
    trained_of_group,
)
from tasks.engine.formats.zero_joins import Joiner
from tasks.engine.formats.zero_states import ModelStates, OptimStates
from tasks.engine.formats.zero_walk import REMEDY, Shape

_LOCAL_EXPERT = re.compile(r"(?P<layer>.*\bdeepspeed_experts\.)(?P<expert>\d+)(?P<rest>\..*)")
_TIED = "tied_modules."


@dataclass(frozen=True, slots=True)
class Model:
    """A model's tensors: homes by name as written, in the model's order; second copies that must be equal; what was trained; and tensors
    of the optimizer that name no parameter (ZeRO-0 counts them). `groups` are the trained names of each flat group, by global name;
    `aliases` map a tied name to the one stored.
    """

    homes: Mapping[str, Home]
    copies: tuple[tuple[str, Home], ...]
    trained: Mapping[str, Trained]
    others: Mapping[str, Home]
    groups: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]


def find_model(files: ZeroFiles, where: str) -> Model:
    """Return the model that a save holds.

    Args:
        files: the save's files.
        where: its folder, for messages.

    Returns:
        Homes of all tensors.

    Raises:
        FormatError: files that contradict each other, or parts of tensor-parallel ranks that do not join.
    """
    join, copies = _Join(files, where), []
    trained: dict[str, Trained] = {}
    homes: dict[str, Home] = {}
    stages = [range(mp, mp + files.tp_degree) for mp in range(0, len(files.models), files.tp_degree)]
    for stage in stages:
        own = join.trained([_trained_of(files.models[mp][0], files.optims[mp] if files.optims else (), where) for mp in stage])
        copies += [(name, parameter.master) for name, parameter in own.items() if name in trained]
        trained = {**own, **trained}
        homes |= join.homes([find_frozen(files.models[mp], sharded=files.sharded) for mp in stage])
    homes |= {name: parameter.master for name, parameter in trained.items()}
    first = files.models[0][0]
    aliases = find_aliases(first, trained)
    for stage in stages:
        homes |= join.homes([find_in_module(files.models[mp][0], homes, aliases) for mp in stage], frozenset(first.buffers))
    homes |= _untrained_weights(files, homes, join)
    copies += join.copies
    homes |= follow_aliases(aliases, homes, first.file.where)
    others = {name: home for ranks in files.optims for name, home in find_foreign(ranks).items()} if files.optims else _unnamed_state(first)
    return Model(_in_order(homes, first), tuple(copies), trained, others, _groups_of(trained), aliases)


class _Join:
    # Joins what the tensor-parallel ranks of one stage hold; that of one rank alone is whole. Collects the copies of what all of them hold.
    def __init__(self, files: ZeroFiles, where: str) -> None:
        self.copies: list[tuple[str, Home]] = []
        self._where = where
        if files.tp_degree > 1 and files.joins is None:
            raise FormatError(
                f"is of {files.tp_degree} tensor-parallel ranks, and no file says how the parts of each tensor join",
                where=where,
                remedy=f"Say it in {INFO_FILE}, in a folder named with --also (docs/deepspeed.md), or save a universal checkpoint.",
            )
        if len(files.models) % files.tp_degree:
            raise FormatError(f"has {len(files.models)} mp ranks, of stages of {files.tp_degree}", where=where, remedy=REMEDY)
        self._joiner = Joiner(files.joins or {}, where)

    def trained(self, ranks: Sequence[Mapping[str, Trained]]) -> dict[str, Trained]:
        if len(ranks) == 1:
            return dict(ranks[0])
        slots = dict.fromkeys(slot for trained in ranks[0].values() for slot in trained.slots)
        joined = {slot: self._joined([{n: t.slots[slot] for n, t in own.items() if slot in t.slots} for own in ranks]) for slot in slots}
        self._keep_copies(joined.get(MASTER, {}))
        return {
            name: replace(first, slots={slot: homes[name][0] for slot, homes in joined.items() if name in homes})
            for name, first in ranks[0].items()
        }

    def homes(self, ranks: Sequence[Mapping[str, Home]], buffers: frozenset[str] = frozenset()) -> dict[str, Home]:
        # Of `buffers`, every rank has a copy.
        if len(ranks) == 1:
            return dict(ranks[0])
        joined = self._joined([{name: home for name, home in own.items() if name not in buffers} for own in ranks])
        joined |= {name: (home, tuple(own[name] for own in ranks[1:])) for name, home in ranks[0].items() if name in buffers}
        self._keep_copies(joined)
        return {name: joined[name][0] for name in ranks[0]}

    def _joined(self, ranks: Sequence[Mapping[str, Home]]) -> dict[str, tuple[Home, tuple[Home, ...]]]:
        odd = next((name for own in ranks for name in own if any(name not in other for other in ranks)), None)
        if odd is not None:
            raise FormatError(f"{odd} is not on every tensor-parallel rank", where=self._where, remedy=REMEDY)
        return {name: self._joiner.join(name, [own[name] for own in ranks]) for name in ranks[0]}

    def _keep_copies(self, joined: Mapping[str, tuple[Home, tuple[Home, ...]]]) -> None:
        self.copies += [(name, copy) for name, (_, copies) in joined.items() for copy in copies]


def _trained_of(states: ModelStates, ranks: Sequence[OptimStates], where: str) -> dict[str, Trained]:
    found: dict[str, Trained] = {}
    if ranks and len(ranks[0].masters) != len(states.groups):
        raise FormatError(
            f"the optimizer files hold {len(ranks[0].masters)} parameter groups, the model states list {len(states.groups)}",
            where=where,
            remedy=REMEDY,
        )
    for index, shapes in enumerate(states.groups if ranks else ()):
        _refuse_mixed_steps(index, ranks)
        sharing = ranks[0].counts[index] if index < len(ranks[0].counts) else len(ranks)
        if sharing == len(ranks):
            found |= trained_of_group(index, shapes, ranks, where, by_map=not states.round_robin)
            continue
        if sharing == 0 or len(ranks) % sharing:
            raise FormatError(f"parameter group {index} is shared by {sharing} of {len(ranks)} ranks", where=where, remedy=REMEDY)
        ep_degree = len(ranks) // sharing
        for ep_rank in range(ep_degree):
            own = trained_of_group(index, shapes, ranks[ep_rank::ep_degree], where, by_map=not states.round_robin)
            names = _global_experts(shapes, ep_rank)
            found |= {names[name]: parameter for name, parameter in own.items()}
    return found


def _refuse_mixed_steps(index: int, ranks: Sequence[OptimStates]) -> None:
    first = _step_value(ranks[0], index)
    other = next((states for states in ranks[1:] if _step_value(states, index) != first), None)
    if other is not None:
        raise FormatError(
            f"the optimizer of parameter group {index} has another step count than in {ranks[0].file.found.name}: parts of two saves",
            where=other.file.where,
            remedy=REMEDY,
        )


def _step_value(states: OptimStates, index: int) -> object:
    step = states.steps[index]
    return states.file.archive.read(f"data/{step.storage.key}") if is_tensor(step) else step


def _global_experts(shapes: Mapping[str, Shape], ep_rank: int) -> dict[str, str]:
    # Name with a local expert number → the name with the global one.
    matches = {name: _LOCAL_EXPERT.fullmatch(name) for name in shapes}
    local: dict[str, set[int]] = {}
    for match in matches.values():
        if match:
            local.setdefault(match["layer"], set()).add(int(match["expert"]))
    renamed = {}
    for name, match in matches.items():
        if match is None:
            renamed[name] = name if ep_rank == 0 else f"{name} (expert-parallel rank {ep_rank})"
        else:
            renamed[name] = f"{match['layer']}{ep_rank * len(local[match['layer']]) + int(match['expert'])}{match['rest']}"
    return renamed


def _untrained_weights(files: ZeroFiles, known: Mapping[str, Home], join: _Join) -> dict[str, Home]:
    # What only the low-precision files of layers and experts hold: frozen weights, buffers, and all weights of ZeRO-0.
    found: dict[str, Home] = {}
    tied = {name.split(".", 2)[2]: known[name].shape for name in known if name.startswith(_TIED) and name.count(".") > 1}
    layers: dict[int, list[dict[str, Home]]] = {}
    for weights in files.layers:
        own = {f"{weights.named.layer}.{name}": _whole(weights, name) for name in weights.tensors}
        layers.setdefault(weights.named.layer, []).append({name: home for name, home in own.items() if name not in known})
    for parts in layers.values():
        found |= {name: home for name, home in join.homes(parts).items() if tied.get(name.split(".", 1)[1]) != home.shape}
    for weights in files.experts:
        found |= {name: _whole(weights, name) for name in weights.tensors if name not in known}
    return found


def _groups_of(trained: Mapping[str, Trained]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in trained.items():
        groups.setdefault(parameter.group, []).append(name)
    return tuple(tuple(groups[index]) for index in sorted(groups))


def _unnamed_state(states: ModelStates) -> dict[str, Home]:
    tensors = collect_tensors(states.optimizer, states.file.where, is_tensor)
    return {".".join(("optimizer", *path)): Home(t.shape, (Part(states.file, t, None),)) for path, t in tensors.items()}


def _whole(weights: WeightFile, name: str) -> Home:
    tensor = weights.tensors[name]
    return Home(tensor.shape, (Part(weights.file, tensor, None),))


def _in_order(homes: Mapping[str, Home], first: ModelStates) -> dict[str, Home]:
    order = [name for name in first.module or {} if name in homes]
    return {name: homes[name] for name in dict.fromkeys([*order, *homes])}
