"""From one rank's local names to global ones: layers numbered over all pipeline stages, experts over all expert-parallel ranks.

Stages count their layers from 0. Layers are ordered by virtual stage first, then by pipeline stage; how many each holds is counted, not
computed, so uneven stages and stages without layers need no formula. Experts are called as SequentialMLP calls them, whatever
implementation wrote them.

Refused: layers or experts with gaps, counts that differ between ranks of one stage or do not add up to args.

Source: Megatron-LM core 0.12 to main, megatron/core/transformer/transformer_block.py,
transformer_layer.py (`get_transformer_layer_offset`), moe/experts.py (GroupedMLP until core 0.14, TEGroupedMLP).
"""

import re
from collections.abc import Mapping, Sequence

from reports.errors import FormatError
from tasks.engine.containers.torch_pickle import StoredTensor
from tasks.engine.formats.megatron_args import REMEDY
from tasks.engine.formats.megatron_files import RankFile, Ranks
from tasks.engine.formats.state_dict import strip_all

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_TE_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_GROUPED = re.compile(r"\.experts\.weight[12]$")
_EXTRA_STATE = re.compile(r"_extra_state\d*$")  # of Transformer Engine: scales of FP8 matmuls, never a weight


def unify(chunk: Mapping[str, StoredTensor], num_local_experts: int, where: str) -> dict[str, StoredTensor]:
    """Return a chunk's tensors without wrapper prefixes and extra states, experts one by one.

    Args:
        chunk: as saved.
        num_local_experts: experts this rank holds.
        where: the file, for messages.

    Returns:
        Local name → tensor; those of grouped experts are views.

    Raises:
        FormatError: two names become one, or grouped experts of another count.
    """
    plain = {name: tensor for name, tensor in chunk.items() if not _EXTRA_STATE.search(name)}
    short = strip_all(plain, where)
    made: dict[str, StoredTensor] = {}
    for name, tensor in plain.items():
        if _GROUPED.search(name):
            made |= _ungroup(short[name], tensor, num_local_experts, where)
        else:
            made[_TE_EXPERT.sub(r".experts.local_experts.\3.\1.\2", short[name])] = tensor
    return made


def _ungroup(name: str, tensor: StoredTensor, num_local_experts: int, where: str) -> dict[str, StoredTensor]:
    # GroupedMLP multiplies from the right: weight1 is (H, E*F) in memory that is read as (E, H, F), weight2 (E*F, H) as (E, F, H).
    prefix, which = name[: -len("weight1")], name[-1]
    if tensor.shape == ():  # an optimizer's step count, which all of them share
        return {f"{prefix}local_experts.{expert}.linear_fc{which}.weight": tensor for expert in range(num_local_experts)}
    numel = tensor.shape[0] * tensor.shape[1] if len(tensor.shape) == 2 else 0
    hidden = tensor.shape[0 if which == "1" else 1] if numel else 0
    if not num_local_experts or not numel or numel % (num_local_experts * hidden) or tensor.strides != (tensor.shape[1], 1):
        raise FormatError(
            f"{name} of shape {tensor.shape} does not hold the weights of {num_local_experts} experts", where=where, remedy=REMEDY
        )
    rows = numel // (num_local_experts * hidden)
    shape = (rows, hidden) if which == "1" else (hidden, rows)
    strides = (1, shape[0])  # transposed
    return {
        f"{prefix}local_experts.{expert}.linear_fc{which}.weight": StoredTensor(
            tensor.dtype, tensor.storage, tensor.storage_offset + expert * rows * hidden, shape, strides
        )
        for expert in range(num_local_experts)
    }


def number_layers(ranks: Ranks, where: str) -> Mapping[tuple[int, int], int]:
    """Return the global number of each chunk's first layer.

    Args:
        ranks: all files.
        where: the save, for messages.

    Returns:
        (pipeline stage, virtual stage) → layers before it.

    Raises:
        FormatError: gaps, ranks of one stage that disagree, or a sum that is not args.num_layers.
    """
    counts: dict[tuple[int, int], tuple[int, str]] = {}
    for file in ranks.files:
        for chunk, tensors in enumerate(file.chunks):
            count = _count_layers(tensors, file)
            known, folder = counts.setdefault((file.pp, chunk), (count, file.folder))
            if known != count:
                raise FormatError(
                    f"{folder} holds {known} layers, {file.folder} of the same stage {count}; parts of two saves",
                    where=where,
                    remedy=REMEDY,
                )
    depths = {file.folder: len(file.chunks) for file in ranks.files}
    if len(set(depths.values())) > 1:
        raise FormatError(f"the files hold different numbers of virtual stages: {depths}", where=where, remedy=REMEDY)
    starts, total = {}, 0
    for chunk in range(max(depths.values())):
        for stage in range(ranks.layout.pp):
            starts[stage, chunk] = total
            total += counts[stage, chunk][0]
    if ranks.layout.num_layers not in (0, total):
        held = ", ".join(f"pp={stage}: {count}" for (stage, _), (count, _) in sorted(counts.items()))
        raise FormatError(
            f"the stages hold {total} layers ({held}), args say num_layers={ranks.layout.num_layers}", where=where, remedy=REMEDY
        )
    return starts


def _count_layers(names: Mapping[str, StoredTensor], file: RankFile) -> int:
    matches = map(_LAYER.match, strip_all(names, file.found.absolute).values())
    return _dense({int(match[1]) for match in matches if match}, "layers", file.found.absolute)


def _dense(numbers: set[int], what: str, where: str) -> int:
    gaps = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if gaps:
        raise FormatError(f"{what} {', '.join(map(str, gaps))} are missing before {what} {max(numbers)}", where=where, remedy=REMEDY)
    return len(numbers)


def globalise(name: str, first_layer: int, first_expert: int) -> str:
    """Return the global name of a local one.

    Args:
        name: as `unify` gave it.
        first_layer: layers in the chunks before this one.
        first_expert: experts on the ranks before this one.

    Returns:
        The name with global numbers.
    """
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _LOCAL_EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + first_expert}.", name)


def check_experts(names: Sequence[str], num_local_experts: int, where: str) -> None:
    """Prove that a chunk holds all of its rank's experts in every MoE layer.

    Args:
        names: as `unify` gave them.
        num_local_experts: experts this rank holds, by args.
        where: the file, for messages.

    Raises:
        FormatError: a layer has others.
    """
    held: dict[str, set[int]] = {}
    for name in names:
        match = _LOCAL_EXPERT.search(name)
        if match:
            held.setdefault(name[: match.start()], set()).add(int(match[1]))
    wrong = [(layer, experts) for layer, experts in held.items() if experts != set(range(num_local_experts))]
    if wrong:
        layer, experts = wrong[0]
        raise FormatError(
            f"{layer} holds experts {sorted(experts)} of this rank, args say it has {num_local_experts}", where=where, remedy=REMEDY
        )
