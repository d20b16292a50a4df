"""Tiny models, as transformers saves them, whose linear layers every encoding holds in several groups and blocks."""

from pathlib import Path

import torch
import transformers

from tests.builders.releases import build_tokenizer, scale_by_fan_in

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict]] = {
    "dense": ("LlamaConfig", {"tie_word_embeddings": False}),
    "tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "moe": (
        "Qwen3MoeConfig",
        {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_experts": 4, "norm_topk_prob": True, "tie_word_embeddings": False},
    ),
}


def build_quantizable(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model `name` of MODELS into `folder`, with a tokenizer."""
    kind, fields = MODELS[name]
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**_COMMON, **fields}))
    scale_by_fan_in(model)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.to(dtype).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
