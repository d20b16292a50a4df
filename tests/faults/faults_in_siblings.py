"""Planted faults of weights that look wrong by themselves or beside their siblings, without any source to compare with."""

from collections.abc import Callable

import torch

from tests.builders.editing import Tensors
from tests.faults.faults_in_structure import copy
from tests.faults.faults_in_weights import DOWN, EMBEDDING, HEAD, assign, both, cast, leave, pad_inside, set_at, tensors
from tests.faults.planting import Fault

LAYER, OTHER = ".layers.1.", ".layers.2."


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

FAULTS = (*DUPLICATES, *ROWS)
