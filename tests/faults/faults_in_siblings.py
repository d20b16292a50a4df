"""Planted faults of weights that look wrong by themselves or beside their siblings, without any source to compare with."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.builders.editing import Tensors
from tests.faults.faults_in_structure import copy
from tests.faults.faults_in_weights import DOWN, EMBEDDING, HEAD, UP, assign, both, cast, fill_all, leave, pad_inside, set_at, tensors
from tests.faults.planting import Fault

LAYER, OTHER = ".layers.1.", ".layers.2."
EXPERT_UP = "model.layers.0.mlp.experts.2.up_proj.weight"


def copy_within_rounding(held: Tensors) -> None:
    held.update({n: held[n.replace(OTHER, LAYER)].bfloat16().float() for n in held if OTHER in n})


def blend(share: float) -> Callable[[Tensors], None]:
    """Return a change that makes layer 2 mostly layer 1."""
    return lambda held: held.update({n: held[n.replace(OTHER, LAYER)] + share * held[n] for n in held if OTHER in n and "norm" not in n})


DUPLICATES = (
    Fault("layer_copied", "dense", "duplicates.unit", copy(LAYER, OTHER)),  # 17
    Fault("layer_copied_then_cast", "dense", "duplicates.unit", both(copy(LAYER, OTHER), cast(torch.bfloat16)), dtype="BF16"),  # 17
    Fault("first_layer_everywhere", "tied", "duplicates.unit", both(copy(".layers.0.", LAYER), copy(".layers.0.", OTHER))),
    Fault("layer_copied_in_moe", "moe", "duplicates.unit", copy(".layers.0.", LAYER)),
    Fault("expert_copied", "moe", "duplicates.unit", copy(".layers.1.mlp.experts.0.", ".layers.1.mlp.experts.3.")),  # 21
    Fault("expert_of_other_layer", "router_bias", "duplicates.unit", copy(".layers.0.mlp.experts.1.", ".layers.1.mlp.experts.1.")),
    Fault("layer_copied_within_rounding", "dense", "duplicates.near-unit", tensors(copy_within_rounding)),
    Fault("matrix_copied", "dense", "duplicates.matrix", copy(f"{LAYER}self_attn.q", f"{OTHER}self_attn.q")),
    Fault("layer_mostly_copied", "dense", "duplicates.near", tensors(blend(0.01))),
    Fault(
        "one_matrix_in_every_layer",
        "tied",
        "duplicates.shared",
        tensors(lambda held: held.update({n: held[DOWN] for n in held if n.endswith("down_proj.weight")})),
    ),
    Fault("layer_copied_in_source", "dense", "duplicates.source", leave, prepare=copy(LAYER, OTHER)),
)


def repeat_half(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:160], weight[:160]])


def set_rows(rows: slice, like: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives rows the values of one row."""

    def make(weight: torch.Tensor) -> torch.Tensor:
        changed = weight.clone()
        changed[rows] = weight[like]
        return changed

    return make


ROWS = (
    Fault("padding_inside_the_vocabulary", "dense", "rows.zero", assign(EMBEDDING, pad_inside)),  # 35
    Fault("row_of_a_word_zeroed", "tied", "rows.zero", set_at(EMBEDDING, (77,), 0.0)),
    Fault("head_shard_not_merged", "dense", "rows.zero", set_at(HEAD, slice(160, 320), 0.0)),  # 37
    Fault("head_rows_times_zero", "moe", "rows.zero", assign(HEAD, lambda t: torch.cat([t[:100], t[100:] * 0.0]))),
    Fault("rows_of_chat_tokens_zeroed", "dense", "rows.zero-reserved", set_at(EMBEDDING, slice(4, 6), 0.0)),  # 39
    Fault("vocabulary_shard_read_twice", "dense", "rows.block", assign(EMBEDDING, repeat_half)),
    Fault("head_shard_read_twice", "moe", "rows.block", both(assign(HEAD, repeat_half), cast(torch.bfloat16)), dtype="BF16"),
    Fault("words_share_a_row", "dense", "rows.equal", assign(EMBEDDING, set_rows(slice(280, 300), 7))),
    Fault("vocabulary_shard_repeated_in_source", "dense", "rows.source", leave, prepare=assign(EMBEDDING, repeat_half)),
)


def less_one(part: str) -> Callable[[Path], None]:
    """Return a planter that takes 1 from every norm with `part` in its name."""
    return tensors(lambda held: held.update({n: t - 1 for n, t in held.items() if part in n and "norm" in n}))


def train_up(held: Tensors) -> None:
    """Give every up projection the heavy tails that training gives."""
    held.update({n: 0.1 * t / t.std() * (1 + (t / t.std()) ** 2) for n, t in held.items() if n.endswith("up_proj.weight")})


def draw_normal(weight: torch.Tensor) -> torch.Tensor:
    return weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))


def draw_uniform(weight: torch.Tensor) -> torch.Tensor:
    return weight.std() * (2 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) - 1)


def lose_half_of_experts(held: Tensors) -> None:
    """Zero half of the rows of three up projections of eight."""
    for expert in range(3):
        held[EXPERT_UP.replace("2.up", f"{expert}.up")][12:] = 0


def drop_every(stride: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what zeroes one value of so many."""
    return lambda weight: weight * (torch.arange(weight.numel()).view(weight.shape) % stride != 0)


OUTLIERS = (
    Fault("gammas_less_one", "dense", "outliers.norms-centred", less_one("")),  # 16
    Fault("gammas_less_one_in_bf16", "moe", "outliers.norms-centred", both(less_one(""), cast(torch.bfloat16)), dtype="BF16"),  # 16
    Fault("gammas_less_one_in_source", "dense", "outliers.norm-lean", leave, prepare=less_one("")),
    Fault("gammas_of_one_role_less_one", "dense", "outliers.norm-lean", less_one("input_layernorm")),  # 16
    Fault("gamma_of_one_layer_less_one", "dense", "outliers.norm-lean", less_one("layers.2.post_attention_layernorm")),
    Fault("query_norms_never_loaded", "moe", "outliers.norm-untouched", fill_all("q_norm.weight", 1.0)),  # 17
    Fault("matrix_at_initial_size", "dense", "outliers.rms", assign(UP, lambda t: 0.02 * draw_normal(t) / t.std())),  # 17
    Fault("matrix_scaled_by_ranks", "dense", "outliers.rms", assign(DOWN, lambda t: t * 4)),
    Fault("expert_at_initial_size", "moe", "outliers.rms", assign(EXPERT_UP, lambda t: 0.02 * draw_normal(t) / t.std())),
    Fault("last_layer_shrunk", "dense", "outliers.rms", assign(DOWN.replace(".1.", ".3."), lambda t: t / 64)),
    Fault("rows_of_one_shard_lost", "dense", "outliers.zeros", set_at(UP, slice(0, 24), 0.0)),  # 51
    Fault("columns_of_one_shard_lost", "tied", "outliers.zeros", assign(DOWN, lambda t: torch.cat([t[:, :72], 0 * t[:, 72:]], 1))),
    Fault("half_of_an_expert_lost", "moe", "outliers.zeros", set_at(EXPERT_UP, slice(12, 24), 0.0)),
    Fault("every_sixteenth_value_lost", "dense", "outliers.zeros", assign(UP, drop_every(16))),
    Fault(
        "shard_lost_in_bf16",
        "router_bias",
        "outliers.zeros",
        both(set_at(EXPERT_UP, slice(12, 24), 0.0), cast(torch.bfloat16)),
        dtype="BF16",
    ),
    Fault("half_of_many_experts_lost", "moe", "outliers.zeros-of-some", tensors(lose_half_of_experts)),
    Fault("rows_lost_in_source", "dense", "outliers.source-zeros", leave, prepare=set_at(UP, slice(0, 24), 0.0)),
    Fault("matrix_drawn_anew", "dense", "outliers.fresh", assign(UP, draw_normal), prepare=tensors(train_up)),  # 17
    Fault("matrix_as_nn_linear_starts_it", "dense", "outliers.fresh", assign(UP, draw_uniform), prepare=tensors(train_up)),  # 17
)

FAULTS = (*DUPLICATES, *ROWS, *OUTLIERS)
