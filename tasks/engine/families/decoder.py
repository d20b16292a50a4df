"""Rows that the Llama-like decoder families share, and the drops that apply to all of them."""

from tasks.engine.families.family import Row
from tasks.engine.tensors.rules import Drop, Rule, published

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"

FIRST: tuple[Row, ...] = (Row(EMBEDDING, ("vocab", "hidden")),)
LAST: tuple[Row, ...] = (Row("model.norm.weight", ("hidden",)), Row(HEAD, ("vocab", "hidden")))
NORMS: tuple[Row, ...] = (
    Row("model.layers.{layer}.input_layernorm.weight", ("hidden",)),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),
)
ATTENTION: tuple[Row, ...] = (
    Row(f"{_ATTENTION}.q_proj.weight", ("q_rows", "hidden")),
    Row(f"{_ATTENTION}.k_proj.weight", ("kv_rows", "hidden")),
    Row(f"{_ATTENTION}.v_proj.weight", ("kv_rows", "hidden")),
    Row(f"{_ATTENTION}.o_proj.weight", ("hidden", "q_rows")),
)
QK_NORMS: tuple[Row, ...] = (
    Row(f"{_ATTENTION}.q_norm.weight", ("head_dim",)),
    Row(f"{_ATTENTION}.k_norm.weight", ("head_dim",)),
)


def qkv_biases(when: str) -> tuple[Row, ...]:
    """Return the bias rows of Q, K and V.

    Args:
        when: the Dims flag they depend on; "" for always.

    Returns:
        Three rows.
    """
    return tuple(Row(f"{_ATTENTION}.{p}_proj.bias", (rows,), when) for p, rows in (("q", "q_rows"), ("k", "kv_rows"), ("v", "kv_rows")))


def mlp(layers: str = "all") -> tuple[Row, ...]:
    """Return the rows of a gated MLP.

    Args:
        layers: which layers have one: "all" or "dense".

    Returns:
        Weight rows.
    """
    return (
        Row(f"{_MLP}.gate_proj.weight", ("intermediate", "hidden"), layers=layers),
        Row(f"{_MLP}.up_proj.weight", ("intermediate", "hidden"), layers=layers),
        Row(f"{_MLP}.down_proj.weight", ("hidden", "intermediate"), layers=layers),
    )


# Recomputed from the config by every loader; old trainers saved them.
BUFFERS: tuple[Drop, ...] = (
    Drop(f"{_ATTENTION}.rotary_emb.inv_freq", "rotary frequencies are recomputed from the config"),
    Drop("model.rotary_emb.inv_freq", "rotary frequencies are recomputed from the config"),
    Drop("model.rotary_emb.original_inv_freq", "rotary frequencies are recomputed from the config"),
)


def published_rows(rows: tuple[Row, ...]) -> tuple[Rule | Drop, ...]:
    """Return the naming rows of a checkpoint that calls tensors as they are published.

    Args:
        rows: the family's rows.

    Returns:
        One rule per row, and the drops.
    """
    return (*published(row.name for row in rows), *BUFFERS)
