"""GPT-2: learned positions, LayerNorm, fused QKV stored (in, out) by Conv1D, always tied unless the config says otherwise.

Source: transformers 5.24 models/gpt2.
"""

from tasks.engine.families.family import ConfigKeys, Family, Row
from tasks.engine.families.megatron import NAMING as MEGATRON
from tasks.engine.tensors.ops import CutRows, JoinQkv, Transpose
from tasks.engine.tensors.rules import Drop, Naming, Rule, published, rename

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
_FROM = "decoder.layers.{layer}"
_PARTS = ("weight", "bias")
# Norms have two names, see families/megatron.py.
_MEGATRON: tuple[Rule | Drop, ...] = (
    Rule("embedding.word_embeddings.weight", (_EMBEDDING,), CutRows("vocab")),
    Rule("output_layer.weight", (_HEAD,), CutRows("vocab")),
    *rename((("embedding.position_embeddings.weight", "transformer.wpe.weight"),)),
    *rename(tuple((f"decoder.final_layernorm.{part}", f"transformer.ln_f.{part}") for part in _PARTS)),
    *rename(tuple((f"{_FROM}.input_layernorm.{part}", f"{_H}.ln_1.{part}") for part in _PARTS)),
    *rename(tuple((f"{_FROM}.self_attention.linear_qkv.layer_norm_{part}", f"{_H}.ln_1.{part}") for part in _PARTS)),
    *rename(tuple((f"{_FROM}.pre_mlp_layernorm.{part}", f"{_H}.ln_2.{part}") for part in _PARTS)),
    *rename(tuple((f"{_FROM}.mlp.linear_fc1.layer_norm_{part}", f"{_H}.ln_2.{part}") for part in _PARTS)),
    *(Rule(f"{_FROM}.self_attention.linear_qkv.{part}", (f"{_H}.attn.c_attn.{part}",), JoinQkv()) for part in _PARTS),
    Rule(f"{_FROM}.self_attention.linear_proj.weight", (f"{_H}.attn.c_proj.weight",), Transpose()),
    Rule(f"{_FROM}.mlp.linear_fc1.weight", (f"{_H}.mlp.c_fc.weight",), Transpose()),
    Rule(f"{_FROM}.mlp.linear_fc2.weight", (f"{_H}.mlp.c_proj.weight",), Transpose()),
    *rename(
        (
            (f"{_FROM}.self_attention.linear_proj.bias", f"{_H}.attn.c_proj.bias"),
            (f"{_FROM}.mlp.linear_fc1.bias", f"{_H}.mlp.c_fc.bias"),
            (f"{_FROM}.mlp.linear_fc2.bias", f"{_H}.mlp.c_proj.bias"),
        )
    ),
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
        Naming(MEGATRON, _MEGATRON),
    ),
    embedding=_EMBEDDING,
    head=_HEAD,
    config=ConfigKeys(
        keys={
            "hidden": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "num_kv_heads": "n_head",  # a config may hold Llama's keys too; nothing reads them
            "intermediate": "n_inner",
            "positions": "n_positions",
        },
        defaults={"tie_word_embeddings": True},
        hidden_multiples={"intermediate": 4},
    ),
    not_linear="its matrices are Conv1D, (in, out), which no quantized format holds",
)
