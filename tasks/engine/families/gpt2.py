"""GPT-2: learned positions, LayerNorm, fused QKV stored (in, out) by Conv1D, always tied unless the config says otherwise.

Source: transformers 5.24 models/gpt2.
"""

from tasks.engine.families.family import ConfigKeys, Family, Row
from tasks.engine.tensors.rules import Drop, Naming, published

_H = "transformer.h.{layer}"
_EMBEDDING = "transformer.wte.weight"
_HEAD = "lm_head.weight"
_ROWS: tuple[Row, ...] = (
    Row(_EMBEDDING, ("vocab", "hidden")),
    Row("transformer.wpe.weight", ("positions", "hidden")),
    *(Row(f"{_H}.{norm}.{part}", ("hidden",)) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")),
    Row(f"{_H}.attn.c_attn.weight", ("hidden", "qkv_rows")),
    Row(f"{_H}.attn.c_attn.bias", ("qkv_rows",)),
    Row(f"{_H}.attn.c_proj.weight", ("hidden", "hidden")),
    Row(f"{_H}.attn.c_proj.bias", ("hidden",)),
    Row(f"{_H}.mlp.c_fc.weight", ("hidden", "intermediate")),
    Row(f"{_H}.mlp.c_fc.bias", ("intermediate",)),
    Row(f"{_H}.mlp.c_proj.weight", ("intermediate", "hidden")),
    Row(f"{_H}.mlp.c_proj.bias", ("hidden",)),
    Row("transformer.ln_f.weight", ("hidden",)),
    Row("transformer.ln_f.bias", ("hidden",)),
    Row(_HEAD, ("vocab", "hidden")),
)

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    rows=_ROWS,
    namings=(
        Naming(
            "published",
            (
                *published(row.name for row in _ROWS),
                Drop(f"{_H}.attn.bias", "the causal mask is a constant that old versions saved"),
                Drop(f"{_H}.attn.masked_bias", "the mask's fill value is a constant that old versions saved"),
            ),
        ),
    ),
    embedding=_EMBEDDING,
    head=_HEAD,
    config=ConfigKeys(
        keys={
            "hidden": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "intermediate": "n_inner",
            "positions": "n_positions",
        },
        defaults={"tie_word_embeddings": True},
        hidden_multiples={"intermediate": 4},
    ),
)
