"""How Megatron cuts each parameter over the tensor-parallel ranks, and where a rank's part lies in the whole.

A *column* parameter is cut on dim 0, a *row* parameter on dim 1, a *whole* one is on every rank and must be the same on all. The first
linear of a gated MLP holds gate and up rows: each rank has its gate rows above its up rows, the whole has all gate rows above all up
rows. Experts are cut over the expert-tensor-parallel ranks.

Whether an MLP is gated is told by its shapes: fc1 has as many rows as fc2 has columns, or twice as many.

Refused: parameters that no row of CUTS describes, where there are several ranks. Sub-blocks of fused projections are never guessed.

Source: Megatron-LM core 0.12 to main, megatron/core/tensor_parallel/layers.py, transformer/{attention,mlp,multi_latent_attention}.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reports.errors import FormatError, RequestError
from tasks.engine.containers.torch_pickle import StoredTensor
from tasks.engine.tensors.region import Region

Cut = Literal["column", "row", "whole", "gated", "declared"]

_NORM = r"(?:\w*(?:layernorm|layer_norm|enorm|hnorm))"
# End of a parameter's name → how it is cut; the first row that fits counts.
CUTS: tuple[tuple[re.Pattern[str], Cut], ...] = (
    (re.compile(r"(?:^|\.)word_embeddings\.weight$"), "column"),
    (re.compile(r"(?:^|\.)output_layer\.(?:weight|bias)$"), "column"),
    (re.compile(r"(?:^|\.)position_embeddings\.weight$"), "whole"),
    (re.compile(r"\.layer_norm_(?:weight|bias)$"), "whole"),  # of Transformer Engine's fused linears
    (re.compile(rf"(?:^|\.){_NORM}\.(?:weight|bias)$"), "whole"),
    (re.compile(r"\.linear_qkv\.(?:weight|bias)$"), "column"),  # rows of the whole, grouped by KV head; a rank may own no whole head
    (re.compile(r"\.linear_proj\.weight$"), "row"),
    (re.compile(r"\.linear_proj\.bias$"), "whole"),
    (re.compile(r"\.linear_fc1\.(?:weight|bias)$"), "gated"),
    (re.compile(r"\.linear_fc2\.weight$"), "row"),
    (re.compile(r"\.linear_fc2\.bias$"), "whole"),
    (re.compile(r"\.router\.(?:weight|bias|expert_bias)$"), "whole"),
    (re.compile(r"\.shared_experts\.gate_weight$"), "whole"),
    (re.compile(r"\.linear_q_proj\.(?:weight|bias)$"), "column"),  # latent attention
    (re.compile(r"\.linear_(?:q|kv)_up_proj\.(?:weight|bias)$"), "column"),
    (re.compile(r"\.linear_(?:q|kv)_down_proj\.weight$"), "declared"),  # cut until core 0.10, whole since
    (re.compile(r"\.eh_proj\.weight$"), "column"),
)
_EXPERT = re.compile(r"\.experts\.")


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the whole tensor, and the part of a rank's tensor that it is."""

    region: Region
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole tensor's shape, and which boxes of it one rank holds."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to a routed expert.

    Args:
        name: a parameter of Megatron.

    Returns:
        Whether it does; a shared expert's does not.
    """
    return _EXPERT.search(name) is not None


def place_part(
    name: str, rank_tensors: Mapping[str, StoredTensor], rank: int, ranks: int, declared: Mapping[str, int], where: str
) -> Whole:
    """Return where one rank's tensor lies in the whole.

    Args:
        name: the parameter, a key of `rank_tensors`.
        rank_tensors: all tensors of this rank.
        rank: its tensor-parallel coordinate; of an expert's parameter, the expert-tensor-parallel one.
        ranks: how many there are.
        declared: rows of latent projections as args state them, by the name of the module.
        where: the file, for messages.

    Returns:
        The whole's shape and the rank's boxes.

    Raises:
        FormatError: no rule for this parameter, or shapes that no MLP has.
    """
    tensor = rank_tensors[name]
    cut = next((cut for pattern, cut in CUTS if pattern.search(name)), None)
    if cut is None:
        if ranks == 1:
            return _whole(tensor)
        raise FormatError(
            f"no rule says how {name} is cut over {ranks} tensor-parallel ranks",
            where=where,
            remedy="Export it with Megatron's own tools, or teach tasks/engine/formats/megatron_cuts.py a row.",
        )
    if cut == "gated":
        return _gated(tensor, rank, ranks) if _is_gated(name, rank_tensors, where) else _cut(tensor, 0, rank, ranks)
    if cut == "declared":
        rows = declared.get(name.rsplit(".", 2)[-2])
        cut = "whole" if rows is None or tensor.shape[0] == rows else "column"
    if cut == "whole":
        return _whole(tensor)
    return _cut(tensor, {"column": 0, "row": 1}[cut], rank, ranks)


def share_of(name: str, shapes: Mapping[str, tuple[int, ...]], rank: int, ranks: int) -> tuple[Region, ...]:
    """Return which boxes of a whole tensor one rank holds, joined on dim 0: where `place_part` puts them.

    Args:
        name: the parameter, a key of `shapes`.
        shapes: of the whole tensors.
        rank: its tensor-parallel coordinate; of an expert's parameter, the expert-tensor-parallel one.
        ranks: how many there are.

    Returns:
        One box, or the gate's and the up projection's.

    Raises:
        RequestError: what is cut does not divide, or no rule says how it is cut.
    """
    shape = shapes[name]
    cut = next((cut for pattern, cut in CUTS if pattern.search(name)), None)
    if cut in ("whole", "declared") or ranks == 1:
        return (Region.whole(shape),)
    if cut is None:
        raise RequestError(f"no rule says how {name} is cut over {ranks} tensor-parallel ranks", where="--tp", remedy="Take 1.")
    dim, parts = 1 if cut == "row" else 0, 1
    if cut == "gated":
        second = shapes[re.sub(r"\.linear_fc1\.(?:weight|bias)$", ".linear_fc2.weight", name)]
        parts = shape[0] // second[1]
    length = shape[dim] // (parts * ranks)
    if length * parts * ranks != shape[dim]:
        what = f"{shape[dim] // parts} {'columns' if dim else 'rows'} of {name}"
        raise RequestError(f"{what} do not divide over {ranks} ranks", where="--tp", remedy="Choose a divisor.")
    extent = tuple(length if d == dim else n for d, n in enumerate(shape))
    starts = (length * (part * ranks + rank) for part in range(parts))
    return tuple(Region(tuple(start if d == dim else 0 for d in range(len(shape))), extent) for start in starts)


def _whole(tensor: StoredTensor) -> Whole:
    return Whole(tensor.shape, (Part(Region.whole(tensor.shape), tensor),))


def _cut(tensor: StoredTensor, dim: int, rank: int, ranks: int) -> Whole:
    shape = tuple(n * ranks if d == dim else n for d, n in enumerate(tensor.shape))
    offset = tuple(n * rank if d == dim else 0 for d, n in enumerate(tensor.shape))
    return Whole(shape, (Part(Region(offset, tensor.shape), tensor),))


def _gated(tensor: StoredTensor, rank: int, ranks: int) -> Whole:
    rows, rest = tensor.shape[0] // 2, tensor.shape[1:]
    zeros = (0,) * len(rest)
    gate, up = (rows_of(tensor, half * rows, rows) for half in (0, 1))
    up_at = rows * ranks + rows * rank
    parts = (Part(Region((rows * rank, *zeros), gate.shape), gate), Part(Region((up_at, *zeros), up.shape), up))
    return Whole((2 * rows * ranks, *rest), parts)


def rows_of(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """Return some rows of a stored tensor.

    Args:
        tensor: the whole of them.
        first: first row.
        count: how many.

    Returns:
        A view: the same storage.
    """
    offset = tensor.storage_offset + first * tensor.strides[0]
    return StoredTensor(tensor.dtype, tensor.storage, offset, (count, *tensor.shape[1:]), tensor.strides)


def _is_gated(name: str, rank_tensors: Mapping[str, StoredTensor], where: str) -> bool:
    other = re.sub(r"\.linear_fc1\.(?:weight|bias)$", ".linear_fc2.weight", name)
    second = rank_tensors.get(other)
    rows = rank_tensors[name].shape[0]
    if second is None or len(second.shape) != 2 or rows not in (second.shape[1], 2 * second.shape[1]):
        found = "is missing" if second is None else f"has shape {second.shape}"
        raise FormatError(f"{name} has {rows} rows, but {other} {found}", where=where, remedy="The file is damaged; export another step.")
    return rows == 2 * second.shape[1]
