"""What a model type is called in GGUF, and its tensors: a table of its own, that the writing of such files does not use.

Sources: ggml docs/gguf.md (standardized tensor names); llama.cpp src/llama-arch.cpp; convert_hf_to_gguf.py (rows that are permuted).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture. The rows of a head's query and key are rotary pairs (0,1), (2,3) … where `has_pairs`, else halves as published."""

    name: str
    has_pairs: bool


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(  # by config.json's model_type
    {
        "llama": Architecture("llama", has_pairs=True),
        "mistral": Architecture("llama", has_pairs=True),
        "qwen2": Architecture("qwen2", has_pairs=False),
        "qwen3": Architecture("qwen3", has_pairs=False),
    }
)
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # by which frequencies are divided, where the config scales RoPE as Llama 3 does
_OUTSIDE: Mapping[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MODULES = {ours: theirs for theirs, ours in _OUTSIDE.items()}
_ROLES = {ours: theirs for theirs, ours in _IN_LAYER.items()}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")


def gguf_name(published: str) -> str:
    """Return what a published tensor is called in GGUF.

    Args:
        published: transformers' name.

    Returns:
        GGUF's name; "" where it has none.
    """
    match = _LAYER.fullmatch(published)
    if match is not None:
        role = _IN_LAYER.get(match[2], "")
        return f"blk.{match[1]}.{role}.{match[3]}" if role else ""
    module, _, suffix = published.rpartition(".")
    return f"{_OUTSIDE[module]}.{suffix}" if module in _OUTSIDE else ""


def published_name(name: str) -> str:
    """Return what a tensor of a GGUF file is called by transformers.

    Args:
        name: GGUF's name.

    Returns:
        The published name; "" where it has none.
    """
    match = _BLOCK.fullmatch(name)
    if match is not None:
        role = _ROLES.get(match[2], "")
        return f"model.layers.{match[1]}.{role}.{match[3]}" if role else ""
    module, _, suffix = name.rpartition(".")
    return f"{_MODULES[module]}.{suffix}" if module in _MODULES else ""


def rotated_part(name: str) -> str:
    """Say whether a tensor makes queries or keys, whose rows rotate.

    Args:
        name: GGUF's name.

    Returns:
        "q", "k", or "".
    """
    match = _ROTATED.fullmatch(name)
    return match[1] if match else ""
