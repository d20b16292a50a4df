"""What the trainer said of the model, held against the config it is to be released with.

Most contradictions would be met later as a shape that does not fit. Those that no shape shows (heads of another size, eps, the RoPE base,
experts per token) would be released unnoticed where no logits are recorded: so they are refused before anything is written.
"""

from collections.abc import Callable, Mapping
from math import isclose

from reports.errors import RequestError
from tasks.engine.families.dims import Config, Dims
from tasks.engine.tensors.catalog import Fact

_TANH = frozenset({"gelu_new", "gelu_pytorch_tanh", "gelu_fast"})
# Words of families.dims that are compared. Not the vocabulary (trainers may count the tokenizer's ids only) and positions (often raised).
_SIZES = frozenset(
    {
        *("hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate", "moe_intermediate", "shared_intermediate"),
        *("num_experts", "tie_word_embeddings"),
    }
)
_TYPES = frozenset({"default", "llama3"})


def check_stated(stated: Mapping[str, Fact], config: Config, dims: Dims | None) -> None:
    """Prove that a config says what the trainer said.

    Args:
        stated: of the catalog.
        config: parsed config.json.
        dims: the sizes read from it; None where no family describes the model.

    Raises:
        RequestError: they contradict each other; every field is named.
    """
    wrong = []
    for word, theirs in stated.items():
        ours = word_of_config(word, config, dims)
        if ours is not None and not _is_same(ours, theirs):
            wrong.append(f"{word} is {ours} in the config, {theirs} in the checkpoint")
    if wrong:
        raise RequestError(
            f"contradicts what the trainer stored with the weights: {'; '.join(wrong)}",
            where="config.json",
            remedy="Give the config.json of this very model with --assets.",
            code="source.config-contradicts",
        )


def word_of_config(word: str, config: Config, dims: Dims | None) -> Fact | None:
    """Return what a config says of one word.

    Args:
        word: of families.dims, or of this module's table.
        config: parsed config.json.
        dims: the sizes read from it; None where no family describes the model.

    Returns:
        Its value; None where the config leaves it open, or nothing here reads it.
    """
    if word in _READ:
        return _READ[word](config)
    if dims is None or word not in _SIZES:
        return None
    return dims.flags.get(word, dims.sizes.get(word))


def _is_same(ours: Fact, theirs: Fact) -> bool:
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def _rope(config: Config) -> Mapping[str, object]:
    # transformers 5 keeps all of RoPE in one place; before, the base stood at the top and the scaling beside it.
    for key in ("rope_parameters", "rope_scaling"):
        held = config.get(key)
        if isinstance(held, Mapping):
            return held
    return {}


def _number(*keys: str) -> Callable[[Config], Fact | None]:
    def read(config: Config) -> Fact | None:
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        return value if isinstance(value, (bool, int, float)) else None

    return read


def _theta(config: Config) -> Fact | None:
    value = _rope(config).get("rope_theta", config.get("rope_theta"))
    return value if isinstance(value, (int, float)) else None


def _rope_type(config: Config) -> Fact | None:
    # Other kinds stretch a model beyond what it was trained on; that is its owner's to decide.
    held = _rope(config)
    value = held.get("rope_type", held.get("type", "default"))
    return value if isinstance(value, str) and value in _TYPES else None


def _gelu(config: Config) -> Fact | None:
    value = config.get("activation_function", config.get("hidden_act"))
    return "tanh" if value in _TANH else "erf" if value == "gelu" else None


_READ: Mapping[str, Callable[[Config], Fact | None]] = {
    "eps": _number("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rope_theta": _theta,
    "rope_type": _rope_type,
    "experts_per_token": _number("num_experts_per_tok"),
    "norm_topk": _number("norm_topk_prob"),
    "gelu": _gelu,
}
