"""GGUF files written by the gguf package alone, as llama.cpp's converter would, and the small models they are made of.

Nothing of the product's writer is used: names and the permutation of rows are spelled out here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.builders.releases import build_tokenizer, scale_by_fan_in

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
LLAMA_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROLES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_COMMON = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# As Llama 3.1 has it: of the 16 frequencies some stay, some are divided, one is between.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_FACTORS = "rope_freqs.weight"
# name: (config class, fields beyond _COMMON). Rows of `odd` are no whole blocks of 32 for down_proj, of `mostly_f16` only
# for down_proj they are; `wide` heads are no hidden / heads.
MODELS: dict[str, tuple[str, dict]] = {
    "dense": ("LlamaConfig", {"tie_word_embeddings": False}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "odd": ("LlamaConfig", {"tie_word_embeddings": False, "intermediate_size": 250, "vocab_size": 317}),
    "mostly_f16": ("LlamaConfig", {"tie_word_embeddings": True, "hidden_size": 48, "intermediate_size": 64}),
    "wide": ("LlamaConfig", {"tie_word_embeddings": False, "head_dim": 64}),
    "scaled": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": SCALED}),
    "mistral": ("MistralConfig", {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 128}),
    "qwen3_narrow": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 32}),
}


@dataclass
class Content:
    """What is written into a file: keys with (value, kind of gguf.GGUFValueType), and arrays with their type, by GGUF's name."""

    architecture: str
    keys: dict[str, tuple[object, gguf.GGUFValueType]] = field(default_factory=dict)
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = field(default_factory=dict)


def build_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, bpe: bool = False) -> Path:
    """Write the model `name` of MODELS into `folder` as transformers does, with a tokenizer of words, or of merges."""
    kind, fields = MODELS[name]
    torch.manual_seed(13)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**_COMMON, **fields}))
    scale_by_fan_in(model)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.to(dtype).save_pretrained(folder)
    (build_bpe() if bpe else build_tokenizer()).save_pretrained(folder)
    return folder


def build_bpe(*, cut: str = LLAMA_CUT, ignore_merges: bool = True) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 300 ids that cuts text as Llama 3 does."""
    core = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(cut), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["the shards of the weights that were trained together " * 3, "reading writing judging 1234 56"], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=128
    )


def content_of(folder: Path, kind: str) -> Content:
    """Return what llama.cpp's converter writes of a folder's model: matrices as `kind`, those it cannot hold as F16, vectors as F32."""
    config = json.loads((folder / "config.json").read_text())
    made = Content(ARCHITECTURES[config["model_type"]])
    made.keys = {name: value for name, value in _keys(config, made.architecture, kind).items() if value[0] is not None}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            values = tensor.float().numpy()
            ours = gguf_name(name)
            if made.architecture == "llama" and ("attn_q." in ours or "attn_k." in ours):
                values = permute(values, values.shape[0] // head_dim)
            made.tensors[ours] = (values, _type_for(values, kind))
    factors = rope_factors(folder)
    if factors is not None:
        made.tensors[ROPE_FACTORS] = (factors, gguf.GGMLQuantizationType.F32)
    return made


def rope_factors(folder: Path) -> np.ndarray | None:
    """What transformers divides each frequency of a folder's model by; None where it scales none."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.rope_parameters["rope_type"] == "default":
        return None
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    whole = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (whole / scaled).numpy()


def add_tokenizer(content: Content) -> None:
    """Put the tokenizer of `build_bpe` into what is written, as llama.cpp's converter does, and that nothing stands around a text."""
    said = json.loads(build_bpe().backend_tokenizer.to_str())
    special = {row["id"]: row["content"] for row in said["added_tokens"]}
    texts = {number: text for text, number in said["model"]["vocab"].items()} | special
    whole, array, truth = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL
    types = [3 if number in special else 1 if number in texts else 5 for number in range(_COMMON["vocab_size"])]
    content.keys |= {
        "tokenizer.ggml.model": ("gpt2", gguf.GGUFValueType.STRING),
        "tokenizer.ggml.pre": ("llama-bpe", gguf.GGUFValueType.STRING),
        "tokenizer.ggml.tokens": ([texts.get(number, f"[PAD{number}]") for number in range(_COMMON["vocab_size"])], array),
        "tokenizer.ggml.token_type": (types, array),
        "tokenizer.ggml.merges": ([" ".join(pair) for pair in said["model"]["merges"]], array),
        "tokenizer.ggml.bos_token_id": (1, whole),
        "tokenizer.ggml.eos_token_id": (2, whole),
        "tokenizer.ggml.add_bos_token": (False, truth),
    }


def gguf_name(name: str) -> str:
    """What GGUF calls a published tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    role, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_ROLES[role]}.{suffix}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotary halves as rotary pairs."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(content: Content, path: Path) -> Path:
    """Write a file with the gguf package."""
    writer = gguf.GGUFWriter(path, content.architecture)
    for key, (value, kind) in content.keys.items():
        writer.add_key_value(key, value, kind)
    for name, (values, kind) in content.tensors.items():
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_release(source: Path, folder: Path, kind: str, change: Callable[[Content], object] = lambda content: None) -> Path:
    """Write a folder of config, tokenizer and one GGUF file of a model, its content changed first."""
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())
    content = content_of(source, kind)
    change(content)
    write_gguf(content, folder / f"model-{kind}.gguf")
    return folder


def _type_for(values: np.ndarray, kind: str) -> gguf.GGMLQuantizationType:
    types = gguf.GGMLQuantizationType
    if values.ndim < 2:
        return types.F32
    return types.F16 if kind == "Q8_0" and values.shape[-1] % 32 else types[kind]


def _keys(config: dict, arch: str, kind: str) -> dict[str, tuple[object, gguf.GGUFValueType]]:
    whole, real, text = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
    head_dim = config.get("head_dim")
    file_type = gguf.LlamaFileType.ALL_F32 if kind == "F32" else gguf.LlamaFileType[f"MOSTLY_{kind}"]
    return {
        f"{arch}.block_count": (config["num_hidden_layers"], whole),
        f"{arch}.context_length": (config["max_position_embeddings"], whole),
        f"{arch}.embedding_length": (config["hidden_size"], whole),
        f"{arch}.feed_forward_length": (config["intermediate_size"], whole),
        f"{arch}.attention.head_count": (config["num_attention_heads"], whole),
        f"{arch}.attention.head_count_kv": (config["num_key_value_heads"], whole),
        f"{arch}.attention.key_length": (head_dim, whole),
        f"{arch}.attention.value_length": (head_dim, whole),
        f"{arch}.rope.dimension_count": (head_dim, whole),
        f"{arch}.rope.freq_base": (config["rope_parameters"]["rope_theta"], real),
        f"{arch}.attention.layer_norm_rms_epsilon": (config["rms_norm_eps"], real),
        f"{arch}.vocab_size": (config["vocab_size"], whole),
        "general.file_type": (int(file_type), whole),
        "tokenizer.ggml.model": ("none", text),
    }
