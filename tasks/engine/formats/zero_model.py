"""One model out of a save's files: dense, pipeline stages, native experts.

    dense       every parameter is in the groups of the one mp rank
    pipeline    each stage has its own groups; a tied module has a copy in every stage that uses it, and the copies must be equal
    experts     a group that fewer ranks share than there are is a group of experts: rank r trains those of expert-parallel rank r % ep, and
                the names in it count that rank's experts, so the global expert is ep_rank * local experts + local expert

Refused: tensor parallelism, since no file says how its parts join.

Source: deepspeed 0.19.8, utils/groups.py (expert groups are of consecutive ranks), moe/experts.py, runtime/pipe/module.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.errors import FormatError
from tasks.engine.containers.torch_pickle import collect_tensors, is_tensor
from tasks.engine.formats.zero_files import WeightFile, ZeroFiles
from tasks.engine.formats.zero_homes import (
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
        FormatError: files that contradict each other, or tensor parallelism.
    """
    _refuse_tensor_parallel(files, where)
    trained: dict[str, Trained] = {}
    homes: dict[str, Home] = {}
    copies: list[tuple[str, Home]] = []
    for mp, states in enumerate(files.models):
        own = _trained_of(states[0], files.optims[mp] if files.optims else (), where)
        for name, parameter in own.items():
            if name in trained:
                copies.append((name, parameter.master))
            else:
                trained[name] = parameter
        homes |= find_frozen(states, sharded=files.sharded)
    homes |= {name: parameter.master for name, parameter in trained.items()}
    first = files.models[0][0]
    aliases = find_aliases(first, trained)
    for states in files.models:
        homes |= find_in_module(states[0], homes, aliases)
    homes |= _untrained_weights(files, homes)
    homes |= follow_aliases(aliases, homes, first.file.where)
    others = {name: home for ranks in files.optims for name, home in find_foreign(ranks).items()} if files.optims else _unnamed_state(first)
    return Model(_in_order(homes, first), tuple(copies), trained, others, _groups_of(trained), aliases)


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


def _untrained_weights(files: ZeroFiles, known: Mapping[str, Home]) -> dict[str, Home]:
    # What only the low-precision files of layers and experts hold: frozen weights, buffers, and all weights of ZeRO-0.
    found: dict[str, Home] = {}
    tied = {name.split(".", 2)[2]: known[name].shape for name in known if name.startswith(_TIED) and name.count(".") > 1}
    for weights in files.layers:
        for name, tensor in weights.tensors.items():
            full = f"{weights.named.layer}.{name}"
            if full not in known and tied.get(name) != tensor.shape:
                found[full] = _whole(weights, name)
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


def _refuse_tensor_parallel(files: ZeroFiles, where: str) -> None:
    first = files.models[0][0]
    is_pipeline = first.module is None
    tp = first.tp_degree if first.tp_degree is not None else (1 if is_pipeline else len(files.models))
    if tp > 1 or any(weights.named.mp for weights in files.layers):
        raise FormatError(
            f"is of {tp} tensor-parallel ranks, and no file says along which dim each tensor's parts join",
            where=where,
            remedy="Save the model without tensor parallelism, or as a universal checkpoint.",
        )
