"""Llama and Mistral: dense decoder, grouped-query attention, gated MLP, RMSNorm. Only Llama's config can ask for biases.

Sources: transformers 5.24 models/llama and models/mistral (names, shapes, bias flags); torchtitan 0.2.2 and 0.3.0 models/llama3
state dict adapters (names, rotary pairs).
"""

from tasks.engine.families import megatron
from tasks.engine.families.decoder import ATTENTION, EMBEDDING, FIRST, HEAD, LAST, NORMS, mlp, published_rows, qkv_biases
from tasks.engine.families.family import ConfigKeys, Family, Row
from tasks.engine.tensors.ops import RopeToHalves, SplitQkv
from tasks.engine.tensors.rules import Drop, Naming, Rule, rename

_L = "model.layers.{layer}"
_ROWS: tuple[Row, ...] = (
    *FIRST,
    *NORMS,
    *ATTENTION,
    *qkv_biases("attention_bias"),
    Row(f"{_L}.self_attn.o_proj.bias", ("hidden",), "attention_bias"),
    *mlp(),
    Row(f"{_L}.mlp.gate_proj.bias", ("intermediate",), "mlp_bias"),
    Row(f"{_L}.mlp.up_proj.bias", ("intermediate",), "mlp_bias"),
    Row(f"{_L}.mlp.down_proj.bias", ("hidden",), "mlp_bias"),
    *LAST,
)
_MISTRAL: tuple[Row, ...] = (*FIRST, *NORMS, *ATTENTION, *mlp(), *LAST)
_TITAN: tuple[Rule | Drop, ...] = (
    *rename(
        (
            ("tok_embeddings.weight", EMBEDDING),
            ("norm.weight", "model.norm.weight"),
            ("layers.{layer}.attention_norm.weight", f"{_L}.input_layernorm.weight"),
            ("layers.{layer}.ffn_norm.weight", f"{_L}.post_attention_layernorm.weight"),
            ("layers.{layer}.attention.wo.weight", f"{_L}.self_attn.o_proj.weight"),
            ("layers.{layer}.feed_forward.w1.weight", f"{_L}.mlp.gate_proj.weight"),
            ("layers.{layer}.feed_forward.w2.weight", f"{_L}.mlp.down_proj.weight"),
            ("layers.{layer}.feed_forward.w3.weight", f"{_L}.mlp.up_proj.weight"),
        )
    ),
    Drop("freqs_cis", "rotary frequencies are recomputed from the config"),
    Drop("rope.cache", "rotary frequencies are recomputed from the config"),
)


def _titan_qkv(prefix: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{prefix}.wq.weight", (f"{_L}.self_attn.q_proj.weight",), RopeToHalves()),
        Rule(f"{prefix}.wk.weight", (f"{_L}.self_attn.k_proj.weight",), RopeToHalves()),
        Rule(f"{prefix}.wv.weight", (f"{_L}.self_attn.v_proj.weight",)),
    )


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    rows=_ROWS,
    namings=(
        Naming("published", published_rows(_ROWS)),
        Naming("torchtitan-0.3", (*_TITAN, *_titan_qkv("layers.{layer}.attention.qkv_linear"), *rename(((HEAD, HEAD),)))),
        Naming(
            "torchtitan-0.3-fused-qkv",
            (
                *_TITAN,
                Rule(
                    "layers.{layer}.attention.qkv_linear.wqkv.weight",
                    tuple(f"{_L}.self_attn.{p}_proj.weight" for p in "qkv"),
                    SplitQkv(rope_pairs=True),
                ),
                *rename(((HEAD, HEAD),)),
            ),
        ),
        Naming("torchtitan-0.2", (*_TITAN, *_titan_qkv("layers.{layer}.attention"), *rename((("output.weight", HEAD),)))),
        Naming(megatron.NAMING, (*megatron.BLOCK, *megatron.dense_mlp(("weight", "bias")))),
    ),
    embedding=EMBEDDING,
    head=HEAD,
)
MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    rows=_MISTRAL,
    namings=(
        Naming("published", published_rows(_MISTRAL)),
        Naming(megatron.NAMING, (*megatron.BLOCK, *megatron.dense_mlp())),
    ),
    embedding=EMBEDDING,
    head=HEAD,
    config=ConfigKeys(defaults={"num_kv_heads": 8}),
)
