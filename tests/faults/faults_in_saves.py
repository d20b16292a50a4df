"""Planted faults of DeepSpeed sources: releases as a wrong reader takes them from a sound save, and a save whose ranks are mixed up."""

from pathlib import Path

from tests.builders.saves import FROZEN, misread_pieces, misread_slices
from tests.faults.faults_in_weights import tensors
from tests.faults.planting import Fault


def exchange_ranks(save: Path) -> None:
    """Give two ranks' optimizer files each other's names: nothing in such a save tells."""
    one, two, aside = (save / name for name in (_name(0), _name(1), "aside"))
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


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
    Fault("zero_ranks_exchanged_on_disk", "zero2", "values.copy-differs", swap_slices, damage=exchange_ranks),
)
