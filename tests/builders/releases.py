"""Sound release folders of tiny models, as transformers' own save_pretrained writes them, and what is known of them.

The models are small but not symmetric: 8 query heads for 2 key-value heads, weights scaled by fan-in (at std 0.02 layout faults hide in
the noise), norms that are not all ones, a vocabulary with more rows than the tokenizer has ids.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from validators.expectation import Expectation, ExpertGroup

VOCABULARY = 320  # rows of the embedding
TOKENIZER_IDS = 300
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
SPECIALS = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<|im_start|>": 4, "<|im_end|>": 5}

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# name: (config class, fields beyond _COMMON, most bytes per file)
MODELS: dict[str, tuple[str, dict, str]] = {
    "dense": ("LlamaConfig", {"num_hidden_layers": 4, "head_dim": 8, "tie_word_embeddings": False}, "200KB"),
    "tied": ("Qwen2Config", {"num_hidden_layers": 3, "tie_word_embeddings": True}, "1GB"),
    "moe": ("Qwen3MoeConfig", {**_MOE, "head_dim": 8, "num_experts": 4, "norm_topk_prob": True, "tie_word_embeddings": False}, "1GB"),
    "router_bias": (
        "DeepseekV3Config",
        {
            **_MOE,
            **{"num_key_value_heads": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "tie_word_embeddings": False},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4},
        },
        "1GB",
    ),
}


@dataclass(frozen=True)
class SoundRelease:
    """A sound folder, and the expectation read off its own headers (names and shapes are transformers').

    `source` is the folder that a quantized release was made from, and whose the expectation is; None for the folder itself. `save` is a
    DeepSpeed save of the same weights, which the release counts as exported from; None for the folder itself. `name_in_save` is what the
    save calls a tensor. `ranks` is a Megatron save of the same weights, whose own forward the logits are held against; None for the
    folder's forward.
    """

    name: str
    folder: Path
    expected: Expectation
    source: Path | None = None
    save: Path | None = None
    name_in_save: Callable[[str], str] = str
    ranks: Path | None = None


def build_release(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard: str = "") -> SoundRelease:
    """Write the sound release `name` of MODELS into `folder`."""
    kind, fields, shard = MODELS[name]
    config = getattr(transformers, kind)(**{**_COMMON, **fields})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    scale_by_fan_in(model)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard or shard)
    build_tokenizer().save_pretrained(folder)
    return SoundRelease(name, folder, expect_from_headers(folder))


def scale_by_fan_in(model: torch.nn.Module) -> None:
    """Give every parameter values of trained size: matrices by fan-in, norms around one, biases small, router biases around 8."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "e_score_correction_bias" in name:
                tensor.copy_(8 + 0.05 * torch.randn(tensor.shape))
            elif tensor.ndim >= 2:
                tensor.copy_(torch.randn(tensor.shape) * (1.0 if "embed_tokens" in name else tensor.shape[-1] ** -0.5))
            elif "norm" in name:
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape))
            else:
                tensor.copy_(0.1 * torch.randn(tensor.shape))


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a word tokenizer with chat tokens and a chat template."""
    vocabulary = {**SPECIALS, **{f"w{i}": i for i in range(len(SPECIALS), TOKENIZER_IDS)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    chat = ["<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=chat, model_max_length=128, **named)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def expect_from_headers(folder: Path) -> Expectation:
    """Return what a sound folder's own headers and config say it should hold."""
    shapes = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in header_shapes(path).items()}
    config = json.loads((folder / "config.json").read_text())
    return Expectation(
        family=config["model_type"],
        shapes=shapes,
        is_tied=config["tie_word_embeddings"],
        tied=(("model.embed_tokens.weight", "lm_head.weight"),),
        experts=_expert_groups(shapes),
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        keep_fp32=frozenset(name for name in shapes if name.endswith("e_score_correction_bias")),
    )


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a safetensors header, parsed by hand."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _expert_groups(shapes: dict) -> tuple[ExpertGroup, ...]:
    found: dict[int, dict[int, list[str]]] = {}
    for name in sorted(shapes):
        if match := re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.", name):
            found.setdefault(int(match[1]), {}).setdefault(int(match[2]), []).append(name)
    return tuple(
        ExpertGroup(layer, f"model.layers.{layer}.mlp.gate.weight", tuple(tuple(experts[e]) for e in sorted(experts)))
        for layer, experts in sorted(found.items())
    )
