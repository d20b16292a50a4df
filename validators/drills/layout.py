"""The parallel layout that a checkpoint tells: sizes of the mesh's axes, and where each rank stands on them.

A rank's *coordinates* are its positions on the axes. They follow from the axes' sizes and the order in which the framework numbers its
ranks; where a format records neither, they are not guessed. What is left out of a row is not known.

Sources: Megatron-LM core 0.16, megatron/core/parallel_state.py (`RankGenerator`) and megatron/training/initialize.py (the two orders),
megatron/core/utils.py (`get_batch_on_this_cp_rank`); DeepSpeed 0.19, runtime/pipe/topology.py; torchtitan 0.3, components/dataloader.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from validators.drills.facts import StateFacts

Coordinates = Mapping[str, int]  # axis → position


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank: its number over all, its coordinates, and the name by which its files go; "" where it has none of its own."""

    rank: int
    coordinates: Coordinates
    files: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes with their sizes, a row per rank, and on what both rest. No rows: the number of ranks is not known."""

    sizes: Coordinates
    ranks: tuple[RankRow, ...]
    basis: str

    def spell(self) -> str:
        """Return the sizes as text.

        Returns:
            "tp 2, pp 2 over 4 ranks".
        """
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return f"{sizes or 'axes not recorded'} over {len(self.ranks) or 'an unknown number of'} ranks"


# Whether Megatron runs with --use-tp-pp-dp-mapping → its axes, the one whose neighbours have consecutive numbers first
_MEGATRON_ORDER: Mapping[bool, tuple[str, ...]] = MappingProxyType({False: ("tp", "cp", "dp", "pp"), True: ("tp", "cp", "pp", "dp")})
_EXPERT_AXES: Mapping[str, str] = MappingProxyType({"tp": "etp", "cp": "ep", "dp": "edp", "pp": "pp"})  # where experts have theirs
_MEGATRON_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp": ("tensor_model_parallel_size", "model_parallel_size"),
        "cp": ("context_parallel_size",),
        "pp": ("pipeline_model_parallel_size",),
        "ep": ("expert_model_parallel_size",),
    }
)
_ZERO_RANK = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)$")
_LAYER_SLICE = re.compile(r"^layer_\d+(?:-model_(\d+))?-model_states\.pt$")
_LAST_NUMBER = re.compile(r"(\d+)$")
_DATA_RANK = re.compile(r"(?:^|\.)dataloader\.dp_rank_(\d+)(?:\.|$)")
_NOT_RECORDED = "the format records no mesh"


def read_layout(facts: StateFacts) -> Layout:
    """Return how a run was cut, as far as its checkpoint tells.

    Args:
        facts: what the checkpoint says.

    Returns:
        The layout; empty where nothing is told.
    """
    return _LAYOUTS[facts.format](facts)


def number_ranks(sizes: Sequence[tuple[str, int]]) -> Iterator[Coordinates]:
    """Yield the coordinates of each rank.

    Args:
        sizes: axes and their sizes, the axis whose neighbours have consecutive numbers first.

    Yields:
        Coordinates, in the order of ranks.
    """
    for rank in range(prod(size for _, size in sizes)):
        coordinates, rest = {}, rank
        for axis, size in sizes:
            rest, coordinates[axis] = divmod(rest, size)
        yield coordinates


def _megatron(facts: StateFacts) -> Layout:
    sizes = {axis: _argument(facts, names) or 1 for axis, names in _MEGATRON_SIZES.items()}
    sizes["etp"] = _argument(facts, ("expert_tensor_parallel_size",)) or sizes["tp"]
    world = _argument(facts, ("world_size",))
    dense, expert = (world // prod(sizes[axis] for axis in axes) for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")))
    if not dense or not expert or dense * prod(sizes[axis] for axis in ("tp", "cp", "pp")) != world:
        told = {axis: sizes[axis] for axis in ("tp", "cp", "pp", "ep", "etp")}
        return Layout(told, (), "the run's arguments, which do not say how many ranks there were")
    sizes |= {"dp": dense, "edp": expert}
    is_other = bool(facts.values.get("args.use_tp_pp_dp_mapping", False))
    order = _MEGATRON_ORDER[is_other]
    has_experts = sizes["ep"] > 1 or sizes["etp"] != sizes["tp"]
    rows = [dict(one) for one in number_ranks([(axis, sizes[axis]) for axis in order])]
    if has_experts:
        experts = number_ranks([(_EXPERT_AXES[axis], sizes[_EXPERT_AXES[axis]]) for axis in order])
        rows = [{**row, **other} for row, other in zip(rows, experts, strict=True)]
    axes = (*order, *(("etp", "ep", "edp") if has_experts else ()))
    ranks = tuple(RankRow(rank, row, _megatron_files(facts, rank, row, sizes)) for rank, row in enumerate(rows))
    named = "-".join(order)
    return Layout({axis: sizes[axis] for axis in axes}, ranks, f"the run's arguments; ranks are numbered {named}, {order[0]} fastest")


def _argument(facts: StateFacts, names: Sequence[str]) -> int:
    found = [facts.values[f"args.{name}"] for name in names if f"args.{name}" in facts.values]
    return next((value for value in found if type(value) is int and value > 0), 0)


def _megatron_files(facts: StateFacts, rank: int, row: Coordinates, sizes: Coordinates) -> str:
    legacy = f"mp_rank_{row['tp']:02d}"
    legacy += f"_{row['pp']:03d}" if sizes["pp"] > 1 else ""
    legacy += f"_{row['ep']:03d}" if sizes["ep"] > 1 else ""
    return next((name for name in (legacy, f"__{rank}") if name in facts.rank_names), "")


def _zero(facts: StateFacts) -> Layout:
    # mp_rank is a tensor-parallel rank, in a pipeline `stage * tp + tensor rank`; "pp_rank" is the data-parallel one.
    found = {match.groups(): name for name in facts.rank_names if (match := _ZERO_RANK.search(name))}
    slices = [match for name in facts.files if (match := _LAYER_SLICE.search(name))]
    mp, dp = (1 + max((int(pair[place]) for pair in found), default=0) for place in (1, 0))
    tp = 1 + max((int(match[1] or 0) for match in slices), default=0) if slices else mp
    sizes = (("tp", tp), ("dp", dp), ("pp", mp // tp))
    names = {(int(data), int(model)): name for (data, model), name in found.items()}
    rows = tuple(RankRow(rank, row, names.get((row["dp"], row["pp"] * tp + row["tp"]), "")) for rank, row in enumerate(number_ranks(sizes)))
    return Layout(dict(sizes), rows if found else (), "the files' names; dp includes sequence parallelism, over which ZeRO shards too")


def _dcp(facts: StateFacts) -> Layout:
    # Where every rank has a data position of its own, there is no other axis than dp.
    positions = {int(match[1]) for name in facts.names() if (match := _DATA_RANK.search(name))}
    rows = _by_file(facts)
    if rows and positions == set(range(len(rows))):
        told = "one data position per rank leaves no other axis"
        return Layout(
            {"dp": len(rows)} | dict.fromkeys(("tp", "pp", "cp"), 1),
            tuple(RankRow(row.rank, {"dp": row.rank}, row.files) for row in rows),
            told,
        )
    shared = f"{len(positions)} data positions among {len(rows)} ranks" if positions else _NOT_RECORDED
    return Layout({"dp": len(positions)} if positions else {}, rows, f"{shared}; the other axes are not recorded" if positions else shared)


def _by_file(facts: StateFacts) -> tuple[RankRow, ...]:
    numbered = [(int(match[1]), name) for name in facts.rank_names if (match := _LAST_NUMBER.search(name))]
    first = min((number for number, _ in numbered), default=0)  # safetensors shards count from 1
    return tuple(RankRow(number - first, {}, name) for number, name in sorted(numbered))


def _files_only(facts: StateFacts) -> Layout:
    return Layout({}, _by_file(facts), _NOT_RECORDED)


def _whole(_: StateFacts) -> Layout:
    return Layout({}, (), "tensors are whole; how they were cut is no longer told")


_LAYOUTS: Mapping[str, Callable[[StateFacts], Layout]] = MappingProxyType(
    {
        "dcp": _dcp,
        "dcp_hf": _files_only,
        "fsdp1_ranks": _files_only,
        "zero": _zero,
        "universal": _whole,
        "megatron": _megatron,
        "megatron_dist": _megatron,
        "hf": _whole,
    }
)


def describe_context(layout: Layout) -> tuple[bool, str]:
    """Return whether context parallelism is recorded, and what it changes.

    Weights, moments and their shards' shapes do not depend on it; the data and the masks do.

    Args:
        layout: of the run.

    Returns:
        Whether its size is known, and a sentence.
    """
    size = layout.sizes.get("cp", 0)
    if size == 1:
        return True, "cp 1: every rank has whole sequences and their masks"
    if not size:
        return False, "not recorded; where it is used, cp ranks share a data position and each has a part of every sequence"
    last = 2 * size - 1
    return True, (
        f"cp {size}: a sequence is {last + 1} chunks, of which cp rank i has chunks i and {last}-i, with their positions and rows of the "
        f"mask; cp ranks share data position and weights, and moments are sharded over dp and cp. At another cp, lengths must divide by "
        f"twice it, and sums round in another order"
    )
