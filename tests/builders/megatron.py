"""Checkpoints as Megatron-LM's ranks write them (legacy format), cut by hand with torch; nothing of the product's readers is used.

A `Model` is drawn as published weights; what Megatron would hold of it is built from them head by head and row by row, then cut per rank.
"""

import argparse
import enum
import io
import math
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.builders.megatron_optimizer import add_optimizer

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """Sizes and kind of a decoder. `experts` 0 is a dense model; `padded` are the rows of the stored embedding.

    With `shared` (the width of the expert that every token passes) it is a Qwen2-MoE, with experts and `qk_norm` a Qwen3-MoE; their layers
    in `dense` have no experts.
    """

    layers: int = 4
    hidden: int = 8
    heads: int = 4
    groups: int = 2
    head_dim: int = 2
    ffn: int = 12
    vocab: int = 10
    padded: int = 16
    experts: int = 0
    shared: int = 0
    dense: tuple[int, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def is_qwen_moe(self) -> bool:
        """Whether experts are called as Qwen calls them."""
        return bool(self.experts and (self.shared or self.qk_norm))


@dataclass(frozen=True)
class Grid:
    """How a run is cut. `stages` are layers per (virtual stage, pipeline stage), None for equal ones; `etp` None is tp."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    stages: tuple[tuple[int, ...], ...] | None = None
    fused_norms: bool = False  # Transformer Engine's names
    experts_as: str = "sequential"  # or "te_grouped", "grouped"
    prefix: str = ""
    args: dict[str, object] = field(default_factory=dict)

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert."""
        return self.tp if self.etp is None else self.etp


def published(model: Model) -> Tensors:
    """The model's weights under published names: Llama's, Qwen's with biases or norms, Mixtral's with experts."""
    generator = torch.Generator().manual_seed(model.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(model.dtype)

    made = {"model.embed_tokens.weight": draw(model.vocab, model.hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        made |= {f"{at}.{norm}_layernorm.weight": draw(model.hidden) for norm in ("input", "post_attention")}
        for letter, heads in (("q", model.heads), ("k", model.groups), ("v", model.groups)):
            made[f"{at}.self_attn.{letter}_proj.weight"] = draw(heads * model.head_dim, model.hidden)
            if model.qkv_bias:
                made[f"{at}.self_attn.{letter}_proj.bias"] = draw(heads * model.head_dim)
        if model.qk_norm:
            made |= {f"{at}.self_attn.{letter}_norm.weight": draw(model.head_dim) for letter in "qk"}
        made[f"{at}.self_attn.o_proj.weight"] = draw(model.hidden, model.heads * model.head_dim)
        if is_sparse(model, layer):
            made[f"{at}.{_router(model)}.weight"] = draw(model.experts, model.hidden)
        if is_sparse(model, layer) and model.shared:
            shared = f"{at}.mlp.shared_expert"
            made |= {f"{shared}.{part}_proj.weight": draw(model.shared, model.hidden) for part in ("gate", "up")}
            made |= {f"{shared}.down_proj.weight": draw(model.hidden, model.shared), f"{shared}_gate.weight": draw(1, model.hidden)}
        for gate, up, down in _mlps(model, layer):
            made |= {gate: draw(model.ffn, model.hidden), up: draw(model.ffn, model.hidden), down: draw(model.hidden, model.ffn)}
    made["model.norm.weight"] = draw(model.hidden)
    if not model.tied:
        made["lm_head.weight"] = draw(model.vocab, model.hidden)
    return made


def is_sparse(model: Model, layer: int) -> bool:
    """Whether a layer has experts."""
    return bool(model.experts) and layer not in model.dense


def _router(model: Model) -> str:
    return "mlp.gate" if model.is_qwen_moe else "block_sparse_moe.gate"


def _mlps(model: Model, layer: int) -> list[tuple[str, str, str]]:
    at = f"model.layers.{layer}"
    if not is_sparse(model, layer):
        return [(f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight", f"{at}.mlp.down_proj.weight")]
    if model.is_qwen_moe:
        named = [f"{at}.mlp.experts.{expert}" for expert in range(model.experts)]
        return [(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight", f"{expert}.down_proj.weight") for expert in named]
    experts = [f"{at}.block_sparse_moe.experts.{expert}" for expert in range(model.experts)]
    return [(f"{expert}.w1.weight", f"{expert}.w3.weight", f"{expert}.w2.weight") for expert in experts]


def config(model: Model) -> dict[str, object]:
    """config.json of the model."""
    kind = "mixtral" if model.experts else "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
    moe: dict[str, object] = {"num_local_experts": model.experts, "num_experts_per_tok": 1} if model.experts else {}
    if model.is_qwen_moe:
        kind = "qwen2_moe" if model.shared else "qwen3_moe"
        moe = {"num_experts": model.experts, "num_experts_per_tok": 1, "moe_intermediate_size": model.ffn}
        moe |= {"mlp_only_layers": list(model.dense)}
    if model.shared:
        moe |= {"shared_expert_intermediate_size": model.shared, "qkv_bias": model.qkv_bias}
    return {
        "model_type": kind,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        **moe,
    }


def whole(model: Model, grid: Grid, weights: Tensors | None = None) -> Tensors:
    """What Megatron holds of the model, uncut: global names, grouped Q, K and V, gate rows above up rows, padded vocabulary.

    `weights` are published ones; None for those that are drawn.
    """
    made: Tensors = {}
    weights = published(model) if weights is None else weights
    noise = torch.Generator().manual_seed(model.seed + 1)

    def pad(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, torch.randn(model.padded - model.vocab, model.hidden, generator=noise).to(model.dtype)])

    made["embedding.word_embeddings.weight"] = pad(weights["model.embed_tokens.weight"])
    for layer in range(model.layers):
        at, to = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention = f"{to}.self_attention"
        first = f"{attention}.linear_qkv.layer_norm_weight" if grid.fused_norms else f"{to}.input_layernorm.weight"
        fused_mlp = grid.fused_norms and not is_sparse(model, layer)
        second = f"{to}.mlp.linear_fc1.layer_norm_weight" if fused_mlp else f"{to}.pre_mlp_layernorm.weight"
        made[first] = weights[f"{at}.input_layernorm.weight"]
        made[second] = weights[f"{at}.post_attention_layernorm.weight"]
        for part in ("weight", "bias") if model.qkv_bias else ("weight",):
            made[f"{attention}.linear_qkv.{part}"] = _group(model, *(weights[f"{at}.self_attn.{x}_proj.{part}"] for x in "qkv"))
        if model.qk_norm:
            made |= {f"{attention}.{x}_layernorm.weight": weights[f"{at}.self_attn.{x}_norm.weight"] for x in "qk"}
        made[f"{attention}.linear_proj.weight"] = weights[f"{at}.self_attn.o_proj.weight"]
        if is_sparse(model, layer):
            made[f"{to}.mlp.router.weight"] = weights[f"{at}.{_router(model)}.weight"]
        if is_sparse(model, layer) and model.shared:
            shared = f"{at}.mlp.shared_expert"
            made[f"{to}.mlp.shared_experts.linear_fc1.weight"] = torch.cat([weights[f"{shared}.{x}_proj.weight"] for x in ("gate", "up")])
            made[f"{to}.mlp.shared_experts.linear_fc2.weight"] = weights[f"{shared}.down_proj.weight"]
            made[f"{to}.mlp.shared_experts.gate_weight"] = weights[f"{shared}_gate.weight"]
        for expert, (gate, up, down) in enumerate(_mlps(model, layer)):
            mlp = f"{to}.mlp.experts.local_experts.{expert}" if is_sparse(model, layer) else f"{to}.mlp"
            made[f"{mlp}.linear_fc1.weight"] = torch.cat([weights[gate], weights[up]])
            made[f"{mlp}.linear_fc2.weight"] = weights[down]
    made["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if not model.tied:
        made["output_layer.weight"] = pad(weights["lm_head.weight"])
    elif grid.pp > 1:
        made["output_layer.weight"] = made["embedding.word_embeddings.weight"].clone()
    return made


def _group(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    size, per_group, rows = model.head_dim, model.heads // model.groups, []
    for group in range(model.groups):
        rows += [q[head * size : (head + 1) * size] for head in range(group * per_group, (group + 1) * per_group)]
        rows += [x[group * size : (group + 1) * size] for x in (k, v)]
    return torch.cat(rows)


def _cut(name: str, value: torch.Tensor, grid: Grid, tp: int) -> torch.Tensor:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        ranks = grid.expert_tp if ".experts." in name else grid.tp
        return value.chunk(ranks, 1)[tp % ranks]
    if name.endswith("linear_fc1.weight"):
        ranks = grid.expert_tp if ".experts." in name else grid.tp
        return torch.cat([half.chunk(ranks)[tp % ranks] for half in value.chunk(2)])
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")):
        return value.chunk(grid.tp)[tp]
    return value


def _stage_names(model: Model, grid: Grid, names: list[str]) -> dict[tuple[int, int], dict[str, str]]:
    """(virtual stage, pipeline stage) → global name → the stage's own name."""
    per_chunk = model.layers // (grid.pp * grid.vpp)
    counts = grid.stages or tuple((per_chunk,) * grid.pp for _ in range(grid.vpp))
    made: dict[tuple[int, int], dict[str, str]] = {}
    first = 0
    for virtual, row in enumerate(counts):
        for stage, count in enumerate(row):
            held = {}
            for layer in range(count):
                prefix = f"decoder.layers.{first + layer}."
                held |= {n: n.replace(prefix, f"decoder.layers.{layer}.") for n in names if n.startswith(prefix)}
            made[virtual, stage] = held
            first += count
    made[0, 0] = {n: n for n in names if n.startswith("embedding.")} | made[0, 0]
    made[grid.vpp - 1, grid.pp - 1] |= {n: n for n in names if n.startswith(("decoder.final_layernorm", "output_layer"))}
    return made


class AttnBackend(enum.Enum):
    """What Megatron's args hold; pickled under Megatron's module."""

    auto = 5


def write_args(model: Model, grid: Grid) -> argparse.Namespace:
    """Megatron's arguments of such a run."""
    return argparse.Namespace(
        **{
            "num_layers": model.layers,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "group_query_attention": True,
            "num_query_groups": model.groups,
            "kv_channels": model.head_dim,
            "ffn_hidden_size": model.ffn,
            "num_experts": model.experts or None,
            "padded_vocab_size": model.padded,
            "vocab_size": model.vocab,
            "untie_embeddings_and_output_weights": not model.tied,
            "tensor_model_parallel_size": grid.tp,
            "pipeline_model_parallel_size": grid.pp,
            "expert_model_parallel_size": grid.ep,
            "expert_tensor_parallel_size": grid.etp,
            "context_parallel_size": 1,
            "consumed_train_samples": 40,
            "attention_backend": AttnBackend.auto,
            "exit_signal": signal.SIGTERM,
            "params_dtype": model.dtype,
            "gtp_weight_remat_size": 1,
            "swiglu": True,
            **grid.args,
        }
    )


def write_legacy(
    folder: Path,
    model: Model,
    grid: Grid,
    *,
    step: int = 7,
    leave_out: tuple[str, ...] = (),
    optimizer: str = "",
    weights: Tensors | None = None,
) -> Tensors:
    """Write `mp_rank_*` folders; return the uncut tensors by global name.

    `leave_out` names folders of ranks that are lost; `optimizer` is "plain", "masters" or "distributed"; `weights` are published ones,
    None for those that are drawn.
    """
    tensors = whole(model, grid, weights)
    stages = _stage_names(model, grid, list(tensors))
    for pp in range(grid.pp):
        for tp, ep in _grid_of_files(grid):
            name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if grid.pp > 1 else "") + (f"_{ep:03d}" if grid.ep > 1 else "")
            if name in leave_out:
                continue
            args = write_args(model, grid)
            args.rank = _rank_of(grid, tp, pp, ep)
            held: dict[str, object] = {"args": args, "checkpoint_version": 3.0, "iteration": step}
            for virtual in range(grid.vpp):
                chunk = {own: _cut(n, tensors[n], grid, tp).clone() for n, own in stages[virtual, pp].items()}
                key = "model" if grid.vpp == 1 else f"model{virtual}"
                held[key] = {grid.prefix + n: v for n, v in _with_local_experts(model, grid, ep, chunk).items()}
            held["rng_state"] = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]
            held["opt_param_scheduler"] = {"max_lr": 0.1, "num_steps": 40}
            (folder / name).mkdir(parents=True, exist_ok=True)
            is_first = ep == min(other for at, other in _grid_of_files(grid) if at == tp)
            vectors = add_optimizer(held, optimizer, is_first=is_first, stages=grid.pp)
            if vectors is not None:
                _save(vectors, folder / name / "distrib_optim.pt")
            _save(held, folder / name / "model_optim_rng.pt")
    return tensors


def _rank_of(grid: Grid, tp: int, pp: int, ep: int) -> int:
    # The first of the ranks that hold this file.
    world = math.lcm(grid.tp, grid.expert_tp * grid.ep)
    return pp * world + next(rank for rank in range(world) if (rank % grid.tp, rank // grid.expert_tp % grid.ep) == (tp, ep))


def _grid_of_files(grid: Grid) -> list[tuple[int, int]]:
    # Which (tp, ep) have a file: those that a rank has, as Megatron numbers ranks (tp fastest; experts: etp fastest, then ep).
    world = max(grid.tp, grid.expert_tp * grid.ep)
    return sorted({(rank % grid.tp, rank // grid.expert_tp % grid.ep) for rank in range(world)})


def _with_local_experts(model: Model, grid: Grid, ep: int, chunk: Tensors) -> dict[str, object]:
    per_rank = model.experts // grid.ep if model.experts else 0
    made: dict[str, object] = {}
    for name, value in chunk.items():
        if ".local_experts." not in name:
            made[name] = value
            if name.endswith("linear_qkv.weight"):
                made[name.replace("weight", "_extra_state")] = None
            continue
        before, _, after = name.partition(".local_experts.")
        expert, _, rest = after.partition(".")
        local = int(expert) - ep * per_rank
        if not 0 <= local < per_rank:
            continue
        if grid.experts_as == "te_grouped":
            made[f"{before}.{rest}{local}"] = value
        else:
            made[f"{before}.local_experts.{local}.{rest}"] = value
    return _grouped(made, per_rank) if grid.experts_as == "grouped" else made


def _grouped(chunk: dict[str, object], per_rank: int) -> dict[str, object]:
    # Megatron's old GroupedMLP: x @ w1 with w1 = weight1.view(E, H, -1), and y @ w2 with w2 = weight2.view(E, -1, H).
    made = {name: value for name, value in chunk.items() if ".local_experts." not in name}
    for prefix in sorted({name.partition(".local_experts.")[0] for name in chunk if ".local_experts." in name}):
        first, second = (
            torch.stack([chunk[f"{prefix}.local_experts.{e}.linear_fc{n}.weight"].T for e in range(per_rank)])  # type: ignore[attr-defined]
            for n in (1, 2)
        )
        made[f"{prefix}.weight1"] = first.reshape(first.shape[1], -1).clone()
        made[f"{prefix}.weight2"] = second.reshape(-1, second.shape[2]).clone()
    return made


def _save(held: object, path: Path) -> None:
    path.write_bytes(saved_bytes(held))


def saved_bytes(held: object) -> bytes:
    """What torch.save makes of an object; pickled under Megatron's module name, which is not installed here."""
    buffer = io.BytesIO()
    with module_of_megatron():
        torch.save(held, buffer)
    return buffer.getvalue()


@contextmanager
def module_of_megatron() -> Iterator[None]:
    """A stand-in for the module that args name, as long as the context lasts."""
    module = types.ModuleType("megatron.core.transformer.enums")
    module.AttnBackend = AttnBackend  # type: ignore[attr-defined]
    names = ["megatron", "megatron.core", "megatron.core.transformer", module.__name__]
    own = AttnBackend.__module__
    sys.modules |= dict.fromkeys(names, module)
    AttnBackend.__module__ = module.__name__
    try:
        yield
    finally:
        AttnBackend.__module__ = own
        for name in names:
            del sys.modules[name]


def edit_rank(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Change what a rank's file holds, in place."""
    path = folder / "model_optim_rng.pt"
    with module_of_megatron():
        held = torch.load(path, weights_only=False)
    change(held)
    path.write_bytes(saved_bytes(held))
