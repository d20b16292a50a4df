"""The forward pass that GGUF's metadata describes, as a config states it, and what no GGUF reader computes.

Sources: ggml docs/gguf.md; llama.cpp src/llama-model.cpp (what an architecture reads); transformers 5.24 (what absent fields mean).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from reports.errors import RequestError

Config = Mapping[str, object]
_THETA, _EPS = 10_000.0, 1e-6
_WINDOWS: Mapping[str, int] = {"mistral": 4096}  # which a config of that type means when it says nothing
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_REMEDY = "Export without --gguf, as safetensors."


@dataclass(frozen=True, slots=True)
class Forward:
    """Sizes and constants. `head_dim` is rotated whole."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] = ()  # by which each frequency is divided; none where all stay


def forward_of(config: Config) -> Forward:
    """Return the forward pass of a config of one of the architectures in validators.gguf_names.

    Args:
        config: parsed config.json.

    Returns:
        Its sizes and constants.

    Raises:
        RequestError: a size is missing, or the config asks for what GGUF readers do not compute (RoPE scaled in other ways than Llama 3's,
            windows, biases, another activation).
    """
    because = next((said for said in (rule(config) for rule in _REFUSED) if said), "")
    if because:
        raise RequestError(because, where="--gguf: config.json", remedy=_REMEDY)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim", 128 if config.get("model_type") == "qwen3" and "head_dim" not in config else hidden // heads)
    return Forward(
        hidden,
        _size(config, "num_hidden_layers"),
        _size(config, "intermediate_size"),
        heads,
        _size(config, "num_key_value_heads", heads if config.get("model_type") == "llama" else 0),
        head_dim,
        _size(config, "vocab_size"),
        _size(config, "max_position_embeddings"),
        _number(config.get("rms_norm_eps"), _EPS),
        rope_theta_of(config),
        _factors(config, head_dim),
    )


def rope_theta_of(config: Config) -> float:
    """Return the RoPE base of a config, in either spelling.

    Args:
        config: parsed config.json.

    Returns:
        The base.
    """
    said = _rope(config).get("rope_theta")
    return _number(said if said is not None else config.get("rope_theta"), _THETA)


def _rope(config: Config) -> Config:
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, Mapping) else {}


def _size(config: Config, key: str, default: int = 0) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value <= 0:
        raise RequestError(f"{key} is {value or 'absent'}", where="--gguf: config.json", remedy="Give the model's own config.json.")
    return value


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default


def _rope_kind(config: Config) -> str:
    return str(_rope(config).get("rope_type", _rope(config).get("type", "default")))


def _factors(config: Config, head_dim: int) -> tuple[float, ...]:
    # Low frequencies are divided by the factor, high ones stay, those between go over smoothly. Source: Llama 3.1's own reference code.
    if _rope_kind(config) == "default":
        return ()
    factor, low, high, trained = (_number(_rope(config).get(key), 0) for key in _LLAMA3)
    theta = rope_theta_of(config)

    def factor_of(pair: int) -> float:
        turns = trained / (2 * math.pi * theta ** (2 * pair / head_dim))  # within the positions of the first training
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return float(1 / ((1 - share) / factor + share))

    return tuple(factor_of(pair) for pair in range(head_dim // 2))


def _scaled_rope(config: Config) -> str:
    kind, said = _rope_kind(config), _rope(config)
    if kind == "default":
        return ""
    if kind != "llama3" or config.get("model_type") != "llama":
        return f"RoPE is scaled ({kind}), which is not written as GGUF"
    factor, low, high, trained = (_number(said.get(key), 0) for key in _LLAMA3)
    is_whole = factor > 0 and 0 < low < high and trained > 0
    return "" if is_whole else f"RoPE is scaled (llama3) by {', '.join(f'{key} {said.get(key)}' for key in _LLAMA3)}"


def _partial_rope(config: Config) -> str:
    share = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return "" if share in (None, 1, 1.0) else f"only {share} of a head is rotated, which is not written as GGUF"


def _window(config: Config) -> str:
    layers = config.get("layer_types")
    if isinstance(layers, list) and any(layer != "full_attention" for layer in layers):
        return "some layers see a window only, which GGUF readers of this architecture do not compute"
    kind = str(config.get("model_type"))
    if kind.startswith("qwen"):
        return (
            "use_sliding_window is set, which GGUF readers of this architecture do not compute" if config.get("use_sliding_window") else ""
        )
    window = config["sliding_window"] if "sliding_window" in config else _WINDOWS.get(kind)
    positions = config.get("max_position_embeddings")
    is_narrow = isinstance(window, int) and isinstance(positions, int) and window < positions
    return f"attention sees {window} positions only, which GGUF readers of this architecture do not compute" if is_narrow else ""


def _biases(config: Config) -> str:
    set_ = [key for key in ("attention_bias", "mlp_bias") if config.get(key)]
    return f"{' and '.join(set_)} is set; transformers reads no such biases from GGUF" if set_ else ""


def _activation(config: Config) -> str:
    said = config.get("hidden_act", "silu")
    return "" if said in ("silu", "swish") else f"hidden_act is {said}, GGUF readers compute silu"


_REFUSED = (_scaled_rope, _partial_rope, _window, _biases, _activation)
