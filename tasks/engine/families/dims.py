"""A model's sizes, read from config.json. Keys are those of transformers; a family may say where it keeps one under another name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reports.errors import RequestError

Config = Mapping[str, object]

# size: the config keys that may hold it, the usual one first.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size",),
    "moe_intermediate": ("moe_intermediate_size",),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_shared_experts": ("n_shared_experts",),
    "shared_intermediate": ("shared_expert_intermediate_size",),
    "sparse_step": ("decoder_sparse_step",),
    "q_lora": ("q_lora_rank",),  # latent attention: ranks, and dims per head with and without positions
    "kv_lora": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "v_dim": ("v_head_dim",),
}
_MOST = {"num_layers": 10_000, "num_experts": 10_000}  # beyond them, listing a model's tensors would not end
FLAGS = ("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes by name, flags by name, and which layers are dense in an MoE model."""

    sizes: Mapping[str, int]
    flags: Mapping[str, bool]
    dense_layers: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def read(
        cls, config: Config, keys: Mapping[str, str], defaults: Mapping[str, int | bool], multiples: Mapping[str, int], *, where: str
    ) -> "Dims":
        """Return the sizes a config states or implies.

        Args:
            config: parsed config.json.
            keys: size → config key, where a family differs from KEYS.
            defaults: size or flag → value when the config leaves it out.
            multiples: size → factor of the hidden size, when the config leaves it out.
            where: the file, for messages.

        Returns:
            The sizes.

        Raises:
            RequestError: a size is missing, not a positive whole number, or heads do not divide.
        """
        sizes = {}
        for size, names in KEYS.items():
            tried = (keys[size],) if size in keys else names
            value = next((config[name] for name in tried if config.get(name) is not None), None)
            if value is None and not any(name in config for name in tried):  # an explicit null means: derive it
                value = defaults.get(size)
            if value is None:
                continue
            if not isinstance(value, int) or value <= 0:
                raise RequestError(f"{tried[0]} is {value!r}, not a positive whole number", where=where, remedy="Correct the config.")
            if value > _MOST.get(size, value):
                raise RequestError(f"{tried[0]} is {value}, no model has so many", where=where, remedy="Correct the config.")
            sizes[size] = int(value)
        _fill_in(sizes, multiples, where)
        flags = {flag: bool(config.get(flag, defaults.get(flag, False))) for flag in FLAGS}
        layers = config.get("mlp_only_layers")
        dense = {n for n in layers if isinstance(n, int)} if isinstance(layers, list) else set()
        flags |= _implied_flags(sizes, flags)
        first = config.get("first_k_dense_replace", defaults.get("first_dense", 0))
        dense |= set(range(first)) if isinstance(first, int) else set()
        step = sizes.get("sparse_step", 1)
        dense |= {layer for layer in range(sizes["num_layers"]) if (layer + 1) % step}
        return cls(sizes, flags, frozenset(dense))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.sizes["num_layers"]

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.flags["tie_word_embeddings"]

    def size(self, name: str) -> int:
        """Return a size.

        Args:
            name: a size of KEYS, one derived from them ("q_rows", "kv_rows", "qkv_rows", "latent_kv_rows", …), or a number.

        Returns:
            Elements.

        Raises:
            RequestError: the config does not state it.
        """
        if name.isdigit():
            return int(name)
        if name not in self.sizes:
            raise RequestError(
                f"no {' or '.join(KEYS.get(name, (name,)))}", where="config.json", remedy="Give the model's own config.json."
            )
        return self.sizes[name]

    def flag(self, name: str) -> bool:
        """Return a flag.

        Args:
            name: one of FLAGS, or one that sizes imply.

        Returns:
            Its value.
        """
        return self.flags[name]

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer is an MoE layer.

        Args:
            layer: its index.

        Returns:
            False for every layer of a dense model.
        """
        return "num_experts" in self.sizes and layer not in self.dense_layers


def _implied_flags(sizes: Mapping[str, int], flags: Mapping[str, bool]) -> dict[str, bool]:
    has_q_lora = "q_lora" in sizes
    return {"q_lora": has_q_lora, "whole_q": not has_q_lora, "q_lora_bias": has_q_lora and flags["attention_bias"]}


def _fill_in(sizes: dict[str, int], multiples: Mapping[str, int], where: str) -> None:
    for size in ("hidden", "num_layers", "num_heads", "vocab"):
        if size not in sizes:
            raise RequestError(f"no {KEYS[size][0]}", where=where, remedy="Give the model's own config.json with --assets.")
    heads = sizes["num_heads"]
    kv_heads = sizes.setdefault("num_kv_heads", heads)
    if "head_dim" not in sizes and sizes["hidden"] % heads:
        raise RequestError(f"{heads} heads do not divide hidden size {sizes['hidden']}", where=where, remedy="Correct the config.")
    if heads % kv_heads:
        raise RequestError(f"{kv_heads} KV heads do not divide {heads} heads", where=where, remedy="Correct the config.")
    head_dim = sizes.setdefault("head_dim", sizes["hidden"] // heads)
    for size, factor in multiples.items():
        sizes.setdefault(size, factor * sizes["hidden"])
    sizes.setdefault("moe_intermediate", sizes.get("intermediate", 0))
    sizes["q_rows"] = heads * head_dim
    sizes["kv_rows"] = kv_heads * head_dim
    sizes["qkv_rows"] = sizes["q_rows"] + 2 * sizes["kv_rows"]
    sizes["shared_rows"] = sizes.get("num_shared_experts", 0) * sizes["moe_intermediate"]
    if "kv_lora" in sizes:
        nope, rope, values = (sizes.get(name, 0) for name in ("nope_dim", "rope_dim", "v_dim"))
        sizes["latent_q_rows"] = heads * (nope + rope)
        sizes["latent_kv_rows"] = sizes["kv_lora"] + rope
        sizes["up_kv_rows"] = heads * (nope + values)
        sizes["v_rows"] = heads * values
        sizes["two_hidden"] = 2 * sizes["hidden"]  # of prediction layers: the embedding beside the hidden state
