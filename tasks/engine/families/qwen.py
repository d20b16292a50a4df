"""Qwen2 and Qwen3, dense.

Source: transformers 5.24 models/qwen2 (biases on Q, K and V, none on O) and models/qwen3 (norms on Q and K, explicit head_dim).
"""

from tasks.engine.families import megatron
from tasks.engine.families.decoder import ATTENTION, EMBEDDING, FIRST, HEAD, LAST, NORMS, QK_NORMS, mlp, published_rows, qkv_biases
from tasks.engine.families.family import ConfigKeys, Family, Row
from tasks.engine.tensors.rules import Naming

_QWEN2: tuple[Row, ...] = (*FIRST, *NORMS, *ATTENTION, *qkv_biases(""), *mlp(), *LAST)
QWEN3_ATTENTION: tuple[Row, ...] = (
    *ATTENTION,
    *QK_NORMS,
    *qkv_biases("attention_bias"),
    Row("model.layers.{layer}.self_attn.o_proj.bias", ("hidden",), "attention_bias"),
)
_QWEN3: tuple[Row, ...] = (*FIRST, *NORMS, *QWEN3_ATTENTION, *mlp(), *LAST)

# What transformers takes for keys that config.json leaves out.
_QWEN2_CONFIG = ConfigKeys(defaults={"num_kv_heads": 32})
_QWEN3_CONFIG = ConfigKeys(defaults={"num_kv_heads": 32, "head_dim": 128})

_QWEN2_NAMINGS = (
    Naming("published", published_rows(_QWEN2)),
    Naming(megatron.NAMING, (*megatron.BLOCK, *megatron.dense_mlp())),
)
_QWEN3_NAMINGS = (
    Naming("published", published_rows(_QWEN3)),
    Naming(megatron.NAMING, (*megatron.BLOCK, *megatron.QK_NORMS, *megatron.dense_mlp())),
)
QWEN2 = Family("qwen2", ("qwen2",), _QWEN2, _QWEN2_NAMINGS, EMBEDDING, HEAD, _QWEN2_CONFIG)
QWEN3 = Family("qwen3", ("qwen3",), _QWEN3, _QWEN3_NAMINGS, EMBEDDING, HEAD, _QWEN3_CONFIG)
