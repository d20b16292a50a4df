"""Checkpoints as Megatron-LM's torch_dist writes them, assembled from torch's own metadata classes; no product code is used."""

import io
import json
import pickle
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from tests.builders.megatron import Grid, Model, Tensors, _cut, _stage_names, saved_bytes, whole, write_args
from tests.builders.megatron_optimizer import flat_buckets

SLOTS = {"exp_avg": 2.0, "exp_avg_sq": 3.0, "param": 4.0}  # slot → what the parameter is multiplied by


@dataclass
class _Files:
    folder: Path
    contents: dict[str, bytearray] = field(default_factory=dict)
    items: dict[str, object] = field(default_factory=dict)
    mcore: dict[str, object] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def put(self, index: MetadataIndex, content: bytes, rank: int) -> None:
        held = self.contents.setdefault(f"__{rank}_0.distcp", bytearray())
        self.places[index] = _StorageInfo(f"__{rank}_0.distcp", len(held), len(content))
        held += content

    def finish(self) -> None:
        for name, content in self.contents.items():
            (self.folder / name).write_bytes(content)
        metadata = Metadata(self.items, None, self.places)
        metadata.mcore_data = self.mcore  # type: ignore[attr-defined]
        metadata.all_local_plans = [SavePlan([])]  # type: ignore[attr-defined]  # as Megatron keeps them
        (self.folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write_torch_dist(
    folder: Path, model: Model, grid: Grid, *, common: str = "entry", stacked: bool = True, axes: bool = True, optimizer: str = ""
) -> Tensors:
    """Write a save; return the tensors a reader finds, by global name.

    `common` is "entry" or "file"; `stacked` False gives every layer keys of its own; `axes` False stores chunks without the axes in front.
    `optimizer` is "plain" (the parameters' shapes) "fragments" (core 0.14's shapes) or "buckets" (dp_reshardable, two dp ranks).
    """
    folder.mkdir(parents=True, exist_ok=True)
    truth = whole(model, Grid(fused_norms=True))
    files = _Files(folder)
    for key, value in _stack(truth, model).items() if stacked else _unstacked(truth).items():
        lead = _lead(key) if stacked else 0
        _put(files, key, value, lead, grid, axes)
        for slot, factor in SLOTS.items() if optimizer in ("plain", "fragments") else ():
            moment = f"optimizer.state.{slot}.{key}"
            if optimizer == "fragments":
                _put_fragments(files, moment, key, value.float() * factor, lead, grid)
            else:
                _put(files, moment, value.float() * factor, lead, grid, axes)
    held = {"args": write_args(model, grid), "checkpoint_version": 3.0, "iteration": 7}
    if common == "file":
        (folder / "common.pt").write_bytes(saved_bytes(held))
    else:
        _object(files, "common_state/shard_0_1", [held])
    if optimizer == "buckets":
        _put_buckets(files, truth, model, grid)
    for layer in range(model.layers):
        _object(files, f"decoder.layers.mlp.linear_fc1._extra_state/shard_{layer}_{model.layers}", [None])
    files.finish()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return truth


def _object(files: _Files, key: str, value: object) -> None:
    files.items[key] = BytesStorageMetadata()
    files.put(MetadataIndex(key), saved_bytes(value), 0)


def _stack(tensors: Tensors, model: Model) -> Tensors:
    made = {name: value for name, value in tensors.items() if not name.startswith("decoder.layers.")}
    for rest in dict.fromkeys(name.split(".", 3)[3] for name in tensors if name.startswith("decoder.layers.")):
        if ".local_experts." in rest:
            continue
        made[f"decoder.layers.{rest}"] = torch.stack([tensors[f"decoder.layers.{layer}.{rest}"] for layer in range(model.layers)])
    for linear in ("linear_fc1", "linear_fc2") if model.experts else ():
        stem = "decoder.layers.{}.mlp.experts.local_experts.{}." + linear + ".weight"
        rows = [torch.stack([tensors[stem.format(layer, e)] for e in range(model.experts)]) for layer in range(model.layers)]
        made[f"decoder.layers.mlp.experts.experts.{linear}.weight"] = torch.stack(rows)
    return made


def _unstacked(tensors: Tensors) -> Tensors:
    return {name.replace(".experts.local_experts.", ".experts.experts."): value for name, value in tensors.items()}


def _lead(key: str) -> int:
    return key.startswith("decoder.layers.") + (".experts.experts." in key)


def _put(files: _Files, key: str, value: torch.Tensor, lead: int, grid: Grid, axes: bool) -> None:
    boxes = _boxes(key, tuple(value.shape), lead, grid)
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in boxes]
    files.items[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
    for number, (offset, shape) in enumerate(reversed(boxes)):  # in no order
        part = value[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))].clone()
        buffer = io.BytesIO()
        torch.save(part if axes else part.reshape(shape[lead:]), buffer)
        files.put(MetadataIndex(key, torch.Size(offset)), buffer.getvalue(), number % (grid.tp * grid.pp))


def _boxes(key: str, shape: tuple[int, ...], lead: int, grid: Grid) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    # One chunk per layer and expert, cut over tp: gated rows in 2T pieces, row-parallel weights on their last dim.
    cuts = [1] * len(shape)
    cuts[:lead] = shape[:lead]
    ranks = grid.expert_tp if ".experts." in key else grid.tp
    if key.endswith("linear_fc1.weight"):
        cuts[lead] = 2 * ranks
    elif key.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")):
        cuts[lead] = ranks
    elif key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        cuts[-1] = ranks
    steps = [n // c for n, c in zip(shape, cuts, strict=True)]
    indices = torch.cartesian_prod(*(torch.arange(c) for c in cuts)).reshape(-1, len(cuts)).tolist()
    return [(tuple(i * s for i, s in zip(index, steps, strict=True)), tuple(steps)) for index in indices]


# The order in which Megatron's layers hold their parameters, by --transformer-impl; norms as torch_dist calls them.
_NORMS = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
_ATTENTION = ("linear_qkv.weight", "linear_qkv.bias", "q_layernorm.weight", "k_layernorm.weight")
_MLP = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
ORDERS = {
    "local": (_NORMS[0], "self_attention.linear_proj.weight", *(f"self_attention.{n}" for n in _ATTENTION), _NORMS[1], *_MLP),
    "transformer_engine": ("self_attention.linear_proj.weight", _NORMS[0], *(f"self_attention.{n}" for n in _ATTENTION), _NORMS[1], *_MLP),
}


def _put_buckets(files: _Files, truth: Tensors, model: Model, grid: Grid) -> None:
    # dp_reshardable: every (tp, pp) rank's buffers, bucket by bucket; pieces and gaps are chunks, cut once more between two dp ranks.
    args = write_args(model, grid)
    stages = _stage_names(model, grid, list(truth))
    order = ORDERS[args.transformer_impl]
    shared = ("word_embeddings.weight", "output_layer.weight") if model.tied and grid.pp > 1 else ()
    for pp, tp, chunk in product(range(grid.pp), range(grid.tp), range(grid.vpp)):
        held = {own: _cut(name, truth[name], grid, tp) for name, own in stages[chunk, pp].items()}
        if model.tied and grid.pp > 1 and (pp, chunk) == (grid.pp - 1, grid.vpp - 1):
            held["output_layer.weight"] = _cut("output_layer.weight", truth["embedding.word_embeddings.weight"], grid, tp)
        names = [name for name in held if name.startswith("embedding.")]
        for layer in range(model.layers):
            names += [name for rest in order if (name := f"decoder.layers.{layer}.{rest}") in held]
        names += [name for name in ("decoder.final_layernorm.weight", "output_layer.weight") if name in held]
        assert len(names) == len(held)
        size = getattr(args, "ddp_bucket_size", None)
        for number, pieces in enumerate(flat_buckets([(name, held[name]) for name in names], size, shared)):
            for slot, factor in SLOTS.items():
                dtype = "(torch.bfloat16, torch.float32)"
                key = f"optimizer.distributed.dp_group_idx_{tp + grid.tp * pp}.gbuf_idx_{chunk}.dtype_{dtype}.bucket_idx_{number}.{slot}"
                _put_pieces(files, key, [piece * factor for piece in pieces], tp)


def _put_pieces(files: _Files, key: str, pieces: list[torch.Tensor], rank: int) -> None:
    total = sum(map(len, pieces))
    chunks, at = [], 0
    for piece in pieces:
        half = max(0, total // 2 - at)  # where the second dp rank's part begins
        for part in (piece[:half], piece[half:]):
            if len(part):
                chunks.append(ChunkStorageMetadata(torch.Size((at,)), torch.Size((len(part),))))
                files.put(MetadataIndex(key, torch.Size((at,))), saved_bytes(part.clone()), rank)
                at += len(part)
    files.items[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((total,)), chunks)


def _put_fragments(files: _Files, key: str, parameter: str, value: torch.Tensor, lead: int, grid: Grid) -> None:
    # Shape (f_0, …, f_n, m): every part of the whole as a flat vector, each in two chunks.
    parts = _boxes(parameter, tuple(value.shape), lead, grid)
    extent = parts[0][1]
    cuts = tuple(n // e for n, e in zip(value.shape, extent, strict=True))
    length = int(torch.tensor(extent).prod())
    chunks = []
    for number, (corner, shape) in enumerate(parts):
        flat = value[tuple(slice(a, a + n) for a, n in zip(corner, shape, strict=True))].reshape(-1)
        index = tuple(a // n for a, n in zip(corner, extent, strict=True))
        for start, stop in ((0, length // 3), (length // 3, length)):
            if start == stop:
                continue
            offset = torch.Size((*index, start))
            chunks.append(ChunkStorageMetadata(offset, torch.Size((*(1 for _ in index), stop - start))))
            files.put(MetadataIndex(key, offset), saved_bytes(flat[start:stop].clone()), number % grid.tp)
    files.items[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size((*cuts, length)), chunks)
    files.mcore[key] = {"nd_reformulated_orig_global_shape": tuple(value.shape)}
