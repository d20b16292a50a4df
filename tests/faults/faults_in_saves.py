"""Planted faults of DeepSpeed sources: releases as a wrong reader takes them from a sound save, and a save whose ranks are mixed up."""

from pathlib import Path

import torch

from tests.builders.editing import Tensors
from tests.builders.saves import FROZEN, misread_pieces, misread_slices
from tests.faults.faults_in_weights import leave, swap, tensors
from tests.faults.planting import Fault


def exchange_ranks(save: Path) -> None:
    """Give two ranks' optimizer files each other's names: nothing in such a save tells."""
    one, two, aside = (save / name for name in (_name(0), _name(1), "aside"))
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def exchange_experts(save: Path) -> None:
    """Give the low-precision files of two expert-parallel ranks' experts each other's numbers."""
    for number in (0, 1):
        one, two = (torch.load(_expert(save, n), weights_only=True) for n in (number, number + 2))
        torch.save(_renumbered(two, number + 2, number), _expert(save, number))
        torch.save(_renumbered(one, number, number + 2), _expert(save, number + 2))


def _expert(save: Path, number: int) -> Path:
    return save / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"


def _renumbered(tensors: Tensors, before: int, after: int) -> Tensors:
    return {name.replace(f"_experts.{before}.", f"_experts.{after}."): value for name, value in tensors.items()}


def _name(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


swap_slices = misread_slices(lambda slices: slices[::-1])
FAULTS = (
    Fault("zero_rank_order_swapped", "zero2", "values.differing", swap_slices),
    Fault("zero_round_robin_ignored", "zero2", "values.differing", misread_slices(list, order=lambda names: names[1::2] + names[::2])),
    Fault("zero_padding_ignored", "zero3", "values.differing", misread_pieces),
    Fault("zero_frozen_lost", "zero3", "inventory.missing", tensors(lambda held: held.pop(FROZEN))),
    Fault(
        "zero_tied_alias_wrong",
        "zero2_tied",
        "tied.head-differs",
        tensors(lambda held: held.update({"lm_head.weight": -held["model.embed_tokens.weight"]})),
    ),
    Fault(
        "zero_expert_ranks_exchanged",
        "zero2_experts",
        "experts.exchanged",
        swap((".experts.0.", ".experts.2."), (".experts.1.", ".experts.3.")),
    ),
    Fault("zero_experts_exchanged_on_disk", "zero2_experts", "values.copy-differs", leave, damage=exchange_experts),
    Fault("zero_ranks_exchanged_on_disk", "zero2", "values.copy-differs", swap_slices, damage=exchange_ranks),
)
