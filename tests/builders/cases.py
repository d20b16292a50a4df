"""The recorded checkpoints in the folder that SHARDWRIGHT_CASES names, and hand-written mappings for those that are not identity."""

import os
from pathlib import Path

import pytest
import torch

from tests.builders.plans import Made, Take, whole
from tests.builders.released import CODES

Tensors = dict[str, torch.Tensor]


def find_case(name: str) -> Path:
    """Return the folder of one recorded checkpoint, or skip the test."""
    root = os.environ.get("SHARDWRIGHT_CASES")
    if not root:
        pytest.skip("cases: not run")
    folder = Path(root) / name
    if not folder.is_dir():
        pytest.skip(f"cases: {name} is not there")
    return folder


def identity(expected: Tensors) -> list[Made]:
    """Every name is its own source."""
    return [whole(name, tuple(value.shape), CODES[value.dtype]) for name, value in expected.items()]


def mixtral_from_fused(expected: Tensors) -> list[Made]:
    """Published per-expert names from transformers' live, fused ones: [E, gate above up, H] and [E, H, I]."""
    experts = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in expected if ".experts." in name)
    made = []
    for name, value in expected.items():
        rows, cols = value.shape if value.ndim == 2 else (0, 0)
        head, _, tail = name.partition(".block_sparse_moe.experts.")
        if not tail:
            made.append(whole(name, tuple(value.shape), "F32", source=name.replace("block_sparse_moe", "mlp")))
            continue
        expert, part, _ = tail.split(".")
        if part == "w2":
            take = Take(f"{head}.mlp.experts.down_proj", (experts, rows, cols), (int(expert), 0, 0), (1, rows, cols))
        else:
            first = 0 if part == "w1" else rows
            take = Take(f"{head}.mlp.experts.gate_up_proj", (experts, 2 * rows, cols), (int(expert), first, 0), (1, rows, cols))
        made.append(Made(name, (rows, cols), "F32", (take,)))
    return made


_TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}


def llama_from_torchtitan(expected: Tensors) -> list[Made]:
    """Published names from torchtitan 0.3's; rows of q and k go from pairs to halves (head dim 16)."""
    made = []
    for name, value in expected.items():
        source = name
        for ours, theirs in _TITAN.items():
            source = source.replace(ours, theirs)
        op = "rope_to_halves" if source.endswith(("wq.weight", "wk.weight")) else "same"
        made.append(whole(name, tuple(value.shape), "F32", source=source, op=op, head_dim=16))
    return made
