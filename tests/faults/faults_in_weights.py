"""Planted faults of shapes, dtypes and values. Numbers in comments are rows of the public catalogue of faults."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.builders.editing import Tensors, edit_tensors
from tests.faults.planting import Fault
from validators.expectation import Evidence

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.1."
Q, K, V, O = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo")  # noqa: E741  (as the papers name them)
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
NORM = f"{LAYER}input_layernorm.weight"
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 8
Change = Callable[[Tensors], None]


def tensors(change: Change) -> Callable[[Path], None]:
    """Return a planter that changes tensors."""
    return lambda folder: edit_tensors(folder, change)


def assign(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Return a planter that replaces one tensor by `make` of it."""
    return tensors(lambda held: held.update({name: make(held[name])}))


def swap(*pairs: tuple[str, str]) -> Callable[[Path], None]:
    """Return a planter that exchanges every tensor with the first text in its name for the one with the second."""

    def change(held: Tensors) -> None:
        before = dict(held)
        for one, other in pairs:
            for name in before:
                if one in name:
                    partner = name.replace(one, other)
                    held[name], held[partner] = before[partner], before[name]

    return tensors(change)


def cast(dtype: torch.dtype, *but: str) -> Callable[[Path], None]:
    """Return a planter that casts everything but names that end in one of `but`: an honest cast."""
    return tensors(lambda held: held.update({n: t.to(dtype) for n, t in held.items() if not n.endswith(but or ("\0",))}))


def both(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a planter that plants one after the other."""

    def plant(folder: Path) -> None:
        for each in plants:
            each(folder)

    return plant


def set_at(name: str, index: tuple[int, ...] | slice, value: float) -> Callable[[Path], None]:
    """Return a planter that sets some elements of a tensor."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[index] = value
        return changed

    return assign(name, make)


def interleave_rope(weight: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    """Return rows of each head from halves to pairs: RoPE's other layout."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def chunk_gate_up(held: Tensors) -> None:
    g, u = held[GATE].chunk(2), held[UP].chunk(2)
    held[GATE], held[UP] = torch.cat([g[0], u[0]]), torch.cat([g[1], u[1]])


def interleave_gate_up(held: Tensors) -> None:
    fused = torch.stack([held[GATE].view(-1, 8, 64), held[UP].view(-1, 8, 64)], 1).reshape(-1, 64)
    held[GATE], held[UP] = (part.clone() for part in fused.chunk(2))


def split_grouped_qkv_as_blocks(held: Tensors) -> None:
    groups = [held[Q].view(KV_HEADS, -1, 64), held[K].view(KV_HEADS, -1, 64), held[V].view(KV_HEADS, -1, 64)]
    held[Q], held[K], held[V] = torch.cat(groups, 1).reshape(-1, 64).split([64, 16, 16])


def pad_inside(weight: torch.Tensor) -> torch.Tensor:
    half = len(weight) // 2
    return torch.cat([weight[:half], torch.zeros(8, weight.shape[1]), weight[half:-8]])


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 7
    return (weight / scale).round() * scale


def truncate_to_bf16(weight: torch.Tensor) -> torch.Tensor:
    return (weight.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def flip_bit(weight: torch.Tensor) -> torch.Tensor:
    bits = weight.clone().view(torch.int32)
    bits.view(-1)[77] ^= 1
    return bits.view(torch.float32)


def make_tiny(held: Tensors) -> None:
    held[UP] = held[UP] * 1e-9


def fill_all(suffix: str, value: float) -> Callable[[Path], None]:
    """Return a planter that fills every tensor whose name ends in `suffix`."""
    return tensors(lambda held: held.update({n: torch.full_like(t, value) for n, t in held.items() if n.endswith(suffix)}))


def leave(folder: Path) -> None:
    """Plant nothing."""


def forget_plan(evidence: Evidence) -> Evidence:
    return replace(evidence, plan=None)


def plan_a_cast(evidence: Evidence) -> Evidence:
    assert evidence.plan is not None
    return replace(evidence, plan=evidence.plan.assign(dtype="BF16", encoding="cast"))


def lose_half_the_comparison(evidence: Evidence) -> Evidence:
    assert evidence.values is not None
    return replace(evidence, values=evidence.values.assign(numel=evidence.values["numel"] // 2))


BIAS = "model.layers.1.self_attn.q_proj.bias"
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"

SHAPES = (
    Fault("norm_cut_short", "dense", "shapes.wrong", assign(NORM, lambda t: t[:60])),
    Fault("gate_transposed", "dense", "shapes.transposed", assign(GATE, lambda t: t.T)),  # 13
    Fault("vocab_tail_lost", "dense", "shapes.vocabulary-short", assign(HEAD, lambda t: t[:300])),  # 37
    Fault("vocab_pad_left", "dense", "shapes.vocabulary-padded", assign(EMBEDDING, lambda t: torch.cat([torch.zeros_like(t), t]))),  # 34
    Fault("vocab_padded", "tied", "shapes.vocabulary-padded", assign(EMBEDDING, lambda t: torch.cat([t, t[:64]]))),  # 35
    Fault("one_tensor_not_cast", "dense", "shapes.dtype", cast(torch.bfloat16, "norm.weight"), dtype="BF16"),  # 46
    Fault("cast_not_asked_for", "dense", "shapes.dtype", cast(torch.bfloat16)),
    Fault("dtype_mixed", "dense", "shapes.mixed-dtypes", assign(NORM, lambda t: t.bfloat16()), amend=forget_plan),  # 46
    Fault("source_mixed", "dense", "shapes.mixed-source", leave, prepare=assign(NORM, lambda t: t.bfloat16())),
    Fault("router_bias_bf16", "router_bias", "shapes.dtype", cast(torch.bfloat16), dtype="BF16"),  # 24
    Fault("router_bias_planned_bf16", "router_bias", "shapes.kept-cast", cast(torch.bfloat16), amend=plan_a_cast, dtype="BF16"),  # 24
)

FINITE = (
    Fault("nan_in_rare_row", "dense", "finite.nonfinite", set_at(EMBEDDING, (311, 5), float("nan"))),
    Fault("infinite_weight", "dense", "finite.nonfinite", set_at(DOWN, (3, 3), float("-inf"))),
    Fault("fp16_overflow", "dense", "finite.nonfinite", cast(torch.float16), prepare=set_at(UP, (1, 1), 1e5), dtype="F16"),  # 40
    Fault("matrix_never_filled", "dense", "finite.all-zero", assign(O, torch.zeros_like)),  # 17
    Fault("projection_never_filled", "dense", "finite.all-zero", fill_all("o_proj.weight", 0.0)),
    Fault("projection_zero_in_source", "dense", "finite.source-zero", leave, prepare=fill_all("o_proj.weight", 0.0)),
    Fault("norm_reset_to_ones", "dense", "finite.constant-outlier", assign(NORM, torch.ones_like)),  # 17
    Fault("one_value_in_every_layer", "dense", "finite.constant", fill_all("up_proj.weight", 0.25)),
    Fault("one_bias_lost", "tied", "finite.zero-bias", assign(BIAS, torch.zeros_like)),
    Fault("router_bias_missing", "router_bias", "finite.zero-bias", fill_all(ROUTER_BIAS, 0.0)),  # 23
)

VALUES = (
    Fault("swap_gate_up", "dense", "values.exchanged", swap((f"{LAYER}mlp.gate", f"{LAYER}mlp.up"))),  # 4
    Fault("swap_k_v", "dense", "values.exchanged", swap((f"{LAYER}self_attn.k", f"{LAYER}self_attn.v"))),
    Fault("swap_layers", "dense", "values.exchanged", swap((".layers.1.", ".layers.2."))),  # 17
    Fault("norms_swapped", "dense", "values.exchanged", swap((f"{LAYER}input_", f"{LAYER}post_attention_"))),  # 18
    Fault("swap_qk_norm", "moe", "values.exchanged", swap(("q_norm", "k_norm"))),  # 18
    Fault("swap_head_embedding", "dense", "values.exchanged", swap((HEAD, EMBEDDING))),
    Fault("expert_gate_up_swapped", "moe", "values.exchanged", swap(("layers.0.mlp.experts.2.gate", "layers.0.mlp.experts.2.up"))),
    Fault(
        "duplicate_layer",
        "dense",
        "values.duplicated",
        tensors(lambda held: held.update({n: held[n.replace(".2.", ".1.")] for n in held if ".layers.2." in n})),
    ),  # 17
    Fault("fused_gate_up_tp", "dense", "values.differing", tensors(chunk_gate_up)),  # 1, 2
    Fault("gate_up_interleaved", "dense", "values.differing", tensors(interleave_gate_up)),  # 3
    Fault("rope_permuted", "dense", "values.differing", assign(Q, interleave_rope)),  # 8, 9, 10
    Fault("rope_permuted_gqa", "dense", "values.differing", assign(K, lambda t: interleave_rope(t, KV_HEADS // 2))),  # 6, 7
    Fault("qkv_grouped_as_blocks", "dense", "values.differing", tensors(split_grouped_qkv_as_blocks)),  # 12
    Fault("transpose_square", "dense", "values.differing", assign(Q, lambda t: t.T)),  # 13
    Fault("kv_heads_tiled", "dense", "values.differing", assign(K, lambda t: t[:HEAD_DIM].repeat(2, 1))),  # 14
    Fault("norm_zero_centered", "dense", "values.differing", assign(NORM, lambda t: t - 1)),  # 16
    Fault("uninit_tensor", "dense", "values.differing", assign(UP, lambda t: 0.02 * torch.randn_like(t))),  # 17
    Fault("vocab_pad_inside", "dense", "values.differing", assign(EMBEDDING, pad_inside)),  # 35
    Fault("reserved_rows_zeroed", "dense", "values.differing", set_at(EMBEDDING, slice(4, 6), 0.0)),  # 39
    Fault("eighth_zeroed", "dense", "values.differing", set_at(DOWN, slice(0, 8), 0.0)),  # 51
    Fault("int4_passed_off", "dense", "values.differing", assign(DOWN, round_to_int4)),
    Fault("cast_by_truncation", "dense", "values.differing", both(assign(UP, truncate_to_bf16), cast(torch.bfloat16)), dtype="BF16"),
    Fault("cast_through_fp16", "dense", "values.differing", both(cast(torch.float16), cast(torch.bfloat16)), dtype="BF16"),
    Fault("one_bit_flipped", "dense", "values.differing", assign(DOWN, flip_bit)),
    Fault("negative_zero", "dense", "values.differing", set_at(UP, (0, 0), -0.0), prepare=set_at(UP, (0, 0), 0.0)),
    Fault("tensor_without_source", "dense", "values.not-compared", tensors(lambda held: held.update({"x.weight": torch.rand(3)}))),
    Fault("half_compared", "dense", "values.partial", leave, amend=lose_half_the_comparison),
    Fault("flushed_to_zero", "dense", "values.flushed", cast(torch.float16), prepare=tensors(make_tiny), dtype="F16"),
)

FAULTS = (*SHAPES, *FINITE, *VALUES)
