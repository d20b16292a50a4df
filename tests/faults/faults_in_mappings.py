"""Planted faults of mappings: releases as a wrong reading of Megatron's ranks makes them.

The plan itself is wrong then, and whatever follows the plan agrees with it; so the values are left out of the evidence, and no logits were
recorded. What the ranks compute by themselves must tell.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.builders.editing import Tensors
from tests.faults.faults_in_structure import config, set_rope
from tests.faults.faults_in_weights import EMBEDDING, HEAD, HEAD_DIM, HEADS, KV_HEADS, swap, tensors
from tests.faults.planting import Fault
from validators.expectation import Evidence

MLP, ATTENTION, EXPERT = "model.layers.{}.mlp", "model.layers.{}.self_attn", "model.layers.{}.mlp.experts.{}."
LAYERS, SPARSE_LAYERS, EXPERTS, PADDED, TP = 4, 2, 4, 384, 2


def as_planned(evidence: Evidence) -> Evidence:
    return replace(evidence, plan=None, values=None, reasons={"values": "they are as the plan says"})


def fault(name: str, plant: Callable[[Path], None], *, base: str = "megatron") -> Fault:
    row = "F32 MoE" if base == "megatron_moe" else "F32"
    return Fault(f"megatron_{name}", base, "logits.mean-kl", plant, amend=as_planned, logits=row)


def every_layer(change: Callable[[Tensors, int], None], layers: int = LAYERS) -> Callable[[Path], None]:
    return tensors(lambda held: [change(held, layer) for layer in range(layers)] and None)


def fc1_joined_plainly(held: Tensors, layer: int) -> None:
    gate, up = (f"{MLP.format(layer)}.{part}_proj.weight" for part in ("gate", "up"))
    ranks = [torch.cat(parts) for parts in zip(held[gate].chunk(TP), held[up].chunk(TP), strict=True)]
    held[gate], held[up] = (half.clone() for half in torch.cat(ranks).chunk(2))


def gate_for_up(held: Tensors, layer: int) -> None:
    gate, up = (f"{MLP.format(layer)}.{part}_proj.weight" for part in ("gate", "up"))
    held[gate], held[up] = held[up], held[gate]


def qkv_as_blocks(held: Tensors, layer: int) -> None:
    q, k, v = (f"{ATTENTION.format(layer)}.{part}_proj.weight" for part in "qkv")
    groups = zip(held[q].chunk(KV_HEADS), held[k].chunk(KV_HEADS), held[v].chunk(KV_HEADS), strict=True)
    rows = torch.cat([torch.cat(group) for group in groups])
    held[q], held[k], held[v] = (part.clone() for part in rows.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]))


def kv_ranks_swapped(held: Tensors, layer: int) -> None:
    for part in "kv":
        name = f"{ATTENTION.format(layer)}.{part}_proj.weight"
        held[name] = torch.cat(held[name].chunk(TP)[::-1])


def deal_experts(order: tuple[int, ...]) -> Callable[[Tensors, int], None]:
    def change(held: Tensors, layer: int) -> None:
        before = dict(held)
        for expert, taken in enumerate(order):
            prefix = EXPERT.format(layer, expert)
            held |= {n: before[n.replace(prefix, EXPERT.format(layer, taken))] for n in before if n.startswith(prefix)}

    return change


def cut_from_the_end(held: Tensors) -> None:
    # The vocabulary's padding lies behind its rows; here the rows in front are left out.
    cut = PADDED - len(held[EMBEDDING])
    held |= {name: torch.cat([held[name][cut:], held[name][:cut]]) for name in (EMBEDDING, HEAD)}


def head_of_embedding(held: Tensors) -> None:
    held[HEAD] = held[EMBEDDING].clone()


FAULTS = (
    fault("fc1_joined_plainly", every_layer(fc1_joined_plainly)),  # 1, 2
    fault("gate_for_up", every_layer(gate_for_up)),  # 4
    fault("qkv_as_blocks", every_layer(qkv_as_blocks)),  # 12
    fault("kv_ranks_swapped", every_layer(kv_ranks_swapped)),
    fault("virtual_stages_one_by_one", swap((".layers.1.", ".layers.2."))),  # pipeline stages as if each had its layers in a row
    fault("head_of_embedding", tensors(head_of_embedding)),
    fault("vocabulary_cut_in_front", tensors(cut_from_the_end)),
    fault("eps_of_another_norm", config(rms_norm_eps=1e-2)),
    fault("theta_of_another_model", set_rope(rope_theta=500000.0)),
    fault("expert_ranks_swapped", every_layer(deal_experts((2, 3, 0, 1)), SPARSE_LAYERS), base="megatron_moe"),
    fault("experts_dealt_one_by_one", every_layer(deal_experts((0, 2, 1, 3)), SPARSE_LAYERS), base="megatron_moe"),
    fault("router_not_normalised", config(norm_topk_prob=False), base="megatron_moe"),
)
