"""Planted faults of weights that look wrong by themselves or beside their siblings, without any source to compare with."""

import torch

from tests.builders.editing import Tensors
from tests.faults.faults_in_structure import copy
from tests.faults.faults_in_weights import DOWN, both, cast, leave, tensors
from tests.faults.planting import Fault

LAYER, OTHER = ".layers.1.", ".layers.2."


def copy_within_rounding(held: Tensors) -> None:
    held.update({n: held[n.replace(OTHER, LAYER)].bfloat16().float() for n in held if OTHER in n})


def blend(share: float):
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

FAULTS = DUPLICATES
