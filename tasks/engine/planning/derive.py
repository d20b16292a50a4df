"""A config made of what the trainer stored beside the weights, where nobody hands one in.

Only for models whose kind its words tell beyond doubt: the rows of KINDS. What they do not tell (special tokens, the tokenizer) stays null,
so that no default of transformers slips in. The vocabulary must be stated: its padded size says nothing.

Source: transformers 5.24, configuration classes of these model types; llama3 scaling constants: Megatron-LM,
megatron/core/models/common/embeddings/rotary_pos_embedding.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reports.errors import RequestError
from tasks.engine.families.dims import Config
from tasks.engine.tensors.catalog import Fact

Stated = Mapping[str, Fact]
_DECODER: Stated = {"position": "rope", "norm": "RMSNorm", "is_gated": True, "has_bias": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """What the words of one model type are, beside its sizes. `absent` are words that must not be stated."""

    model_type: str
    architecture: str
    words: Stated
    absent: tuple[str, ...] = ()


KINDS: tuple[Kind, ...] = (
    Kind(
        "gpt2",
        "GPT2LMHeadModel",
        {"position": "learned_absolute", "norm": "LayerNorm", "is_gated": False, "has_bias": True},
        ("num_experts",),
    ),
    Kind("llama", "LlamaForCausalLM", {**_DECODER, "has_qkv_bias": False, "has_qk_norm": False}, ("num_experts",)),
    Kind("qwen2", "Qwen2ForCausalLM", {**_DECODER, "has_qkv_bias": True, "has_qk_norm": False}, ("num_experts",)),
    Kind("qwen3", "Qwen3ForCausalLM", {**_DECODER, "has_qkv_bias": False, "has_qk_norm": True}, ("num_experts",)),
    Kind(
        "mixtral",
        "MixtralForCausalLM",
        {**_DECODER, "has_qkv_bias": False, "has_qk_norm": False, "norm_topk": True, "all_sparse": True},
        ("shared_intermediate",),
    ),
)
# Word → the config's key; those of GPT-2 differ.
_KEYS: Mapping[str, str] = {
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "moe_intermediate": "intermediate_size",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
_GPT2_KEYS: Mapping[str, str] = {
    "hidden": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate": "n_inner",
    "vocab": "vocab_size",
    "positions": "n_positions",
    "eps": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
}
_NEEDED = ("hidden", "num_layers", "num_heads", "vocab", "positions", "eps", "tie_word_embeddings")


def derive_config(stated: Stated) -> Config:
    """Return the config that a checkpoint's own words make.

    Args:
        stated: of the catalog.

    Returns:
        A config; empty where nothing is stated.

    Raises:
        RequestError: the words fit no kind, or leave a size open.
    """
    if not stated:
        return {}
    remedy = "Give the folder of config.json and tokenizer with --assets."
    kind = next((kind for kind in KINDS if _is_of(kind, stated)), None)
    if kind is None:
        raise RequestError("no config.json, and what the trainer stored does not tell the model's kind", where="--assets", remedy=remedy)
    lacking = [word for word in _NEEDED if word not in stated]
    if lacking:
        raise RequestError(f"no config.json, and what the trainer stored leaves open {', '.join(lacking)}", where="--assets", remedy=remedy)
    keys = _GPT2_KEYS if kind.model_type == "gpt2" else _KEYS
    sizes = {key: stated[word] for word, key in keys.items() if word in stated}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"architectures": [kind.architecture], "model_type": kind.model_type, **sizes, **_activation(stated), **_rope(stated), **special}


def _is_of(kind: Kind, stated: Stated) -> bool:
    return all(stated.get(word) == value for word, value in kind.words.items()) and not any(word in stated for word in kind.absent)


def _activation(stated: Stated) -> dict[str, object]:
    if stated.get("is_gated"):
        return {"hidden_act": "silu"}
    return {"activation_function": {"tanh": "gelu_new", "erf": "gelu"}[str(stated["gelu"])]}


def _rope(stated: Stated) -> dict[str, object]:
    if stated.get("position") != "rope":
        return {}
    held: dict[str, object] = {"rope_theta": stated["rope_theta"], "rope_type": stated["rope_type"]}
    if stated["rope_type"] == "llama3":
        held |= {"factor": stated["rope_factor"], "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_parameters": held}
