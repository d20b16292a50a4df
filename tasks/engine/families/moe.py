"""Mixtral, Qwen2-MoE and Qwen3-MoE: published per expert, fused in memory by transformers 5.

A live transformers >= 5 model holds `mlp.experts.gate_up_proj` (E, 2I, H), gate rows before up rows, and `mlp.experts.down_proj`
(E, H, I). Source: transformers 5.24 conversion_mapping and models/mixtral, models/qwen2_moe,
models/qwen3_moe.
"""

from tasks.engine.families import megatron
from tasks.engine.families.decoder import ATTENTION, EMBEDDING, FIRST, HEAD, LAST, NORMS, mlp, published_rows, qkv_biases
from tasks.engine.families.family import ConfigKeys, ExpertNames, Family, Row
from tasks.engine.families.qwen import QWEN3_ATTENTION
from tasks.engine.tensors.ops import Unstack
from tasks.engine.tensors.rules import Naming, Rule

_L = "model.layers.{layer}"
_FUSED = f"{_L}.mlp.experts"


def expert_rows(prefix: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return one expert's weight rows.

    Args:
        prefix: the name before the expert's id.
        gate: the published name of the gate projection, (moe_intermediate, hidden).
        up: that of the up projection, likewise.
        down: that of the down projection, (hidden, moe_intermediate).

    Returns:
        Rows of sparse layers.
    """
    return (
        Row(f"{prefix}.{{expert}}.{gate}.weight", ("moe_intermediate", "hidden"), layers="sparse"),
        Row(f"{prefix}.{{expert}}.{up}.weight", ("moe_intermediate", "hidden"), layers="sparse"),
        Row(f"{prefix}.{{expert}}.{down}.weight", ("hidden", "moe_intermediate"), layers="sparse"),
    )


def fused_experts(experts: tuple[Row, ...]) -> tuple[Rule, ...]:
    """Return how transformers 5 holds the experts of a layer in memory.

    Args:
        experts: the published rows, as `expert_rows` gives them.

    Returns:
        Rules that take the fused tensors apart.
    """
    gate, up, down = (row.name for row in experts)
    return (Rule(f"{_FUSED}.gate_up_proj", (gate, up), Unstack()), Rule(f"{_FUSED}.down_proj", (down,), Unstack()))


_MIXTRAL_EXPERTS = expert_rows(f"{_L}.block_sparse_moe.experts", "w1", "w3", "w2")
_MIXTRAL_ROUTER = Row(f"{_L}.block_sparse_moe.gate.weight", ("num_experts", "hidden"), layers="sparse")
_MIXTRAL_LAYER: tuple[Row, ...] = (*NORMS, *ATTENTION)
_MIXTRAL: tuple[Row, ...] = (*FIRST, *_MIXTRAL_LAYER, _MIXTRAL_ROUTER, *_MIXTRAL_EXPERTS, *LAST)

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    rows=_MIXTRAL,
    namings=(
        Naming("published", published_rows(_MIXTRAL)),
        Naming(
            "transformers-5",
            (
                *published_rows((*FIRST, *_MIXTRAL_LAYER, *LAST)),
                Rule(f"{_L}.mlp.gate.weight", (_MIXTRAL_ROUTER.name,)),
                *fused_experts(_MIXTRAL_EXPERTS),
            ),
        ),
        Naming(
            megatron.NAMING,
            (
                *megatron.BLOCK,
                *megatron.moe(_MIXTRAL_ROUTER.name, f"{_L}.block_sparse_moe.experts.{{expert}}", "w1", "w3", "w2"),
            ),
        ),
    ),
    embedding=EMBEDDING,
    head=HEAD,
    config=ConfigKeys(defaults={"num_kv_heads": 8}),
    experts=ExpertNames(_MIXTRAL_ROUTER.name, tuple(row.name for row in _MIXTRAL_EXPERTS)),
    ignore=("lm_head", r"re:.*\.block_sparse_moe\.gate$"),
)

_QWEN3_EXPERTS = expert_rows(f"{_L}.mlp.experts", "gate_proj", "up_proj", "down_proj")
_QWEN3_ROUTER = Row(f"{_L}.mlp.gate.weight", ("num_experts", "hidden"), layers="sparse")
_QWEN3_LAYER: tuple[Row, ...] = (*NORMS, *QWEN3_ATTENTION, *mlp("dense"), _QWEN3_ROUTER)
_QWEN3: tuple[Row, ...] = (*FIRST, *_QWEN3_LAYER, *_QWEN3_EXPERTS, *LAST)

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    rows=_QWEN3,
    namings=(
        Naming("published", published_rows(_QWEN3)),
        Naming("transformers-5", (*published_rows((*FIRST, *_QWEN3_LAYER, *LAST)), *fused_experts(_QWEN3_EXPERTS))),
        Naming(
            megatron.NAMING,
            (
                *megatron.BLOCK,
                *megatron.QK_NORMS,
                *megatron.dense_mlp(),
                *megatron.moe(_QWEN3_ROUTER.name, f"{_L}.mlp.experts.{{expert}}", "gate_proj", "up_proj", "down_proj"),
            ),
        ),
    ),
    embedding=EMBEDDING,
    head=HEAD,
    config=ConfigKeys(defaults={"num_kv_heads": 4}),
    experts=ExpertNames(_QWEN3_ROUTER.name, tuple(row.name for row in _QWEN3_EXPERTS)),
    ignore=("lm_head", r"re:.*\.mlp\.gate$"),
)

_MLP = f"{_L}.mlp"
_SHARED: tuple[Row, ...] = (
    Row(f"{_MLP}.shared_expert.gate_proj.weight", ("shared_intermediate", "hidden"), layers="sparse"),
    Row(f"{_MLP}.shared_expert.up_proj.weight", ("shared_intermediate", "hidden"), layers="sparse"),
    Row(f"{_MLP}.shared_expert.down_proj.weight", ("hidden", "shared_intermediate"), layers="sparse"),
    Row(f"{_MLP}.shared_expert_gate.weight", ("1", "hidden"), layers="sparse"),
)
_QWEN2_LAYER: tuple[Row, ...] = (*NORMS, *ATTENTION, *qkv_biases("qkv_bias"), *mlp("dense"), _QWEN3_ROUTER, *_SHARED)
_QWEN2: tuple[Row, ...] = (*FIRST, *_QWEN2_LAYER, *_QWEN3_EXPERTS, *LAST)

QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    rows=_QWEN2,
    namings=(
        Naming("published", published_rows(_QWEN2)),
        Naming("transformers-5", (*published_rows((*FIRST, *_QWEN2_LAYER, *LAST)), *fused_experts(_QWEN3_EXPERTS))),
        Naming(
            megatron.NAMING,
            (
                *megatron.BLOCK,
                *megatron.dense_mlp(),
                *megatron.moe(_QWEN3_ROUTER.name, f"{_MLP}.experts.{{expert}}", "gate_proj", "up_proj", "down_proj"),
                *megatron.shared_experts(f"{_MLP}.shared_expert", f"{_MLP}.shared_expert_gate.weight"),
            ),
        ),
    ),
    embedding=EMBEDDING,
    head=HEAD,
    config=ConfigKeys(
        defaults={
            "num_kv_heads": 16,
            "num_experts": 60,
            "moe_intermediate": 1408,
            "shared_intermediate": 5632,
            "qkv_bias": True,
        }
    ),
    experts=ExpertNames(_QWEN3_ROUTER.name, tuple(row.name for row in _QWEN3_EXPERTS)),
    ignore=("lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.shared_expert_gate$"),
)
