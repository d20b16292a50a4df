"""DeepSeek-V3: latent attention, shared and routed experts, a router bias that is kept in fp32.

The router adds `e_score_correction_bias` to the scores it chooses experts by; in bf16 its values collapse onto a few, and other experts are
chosen. Layers below `first_k_dense_replace` are dense. Multi-token prediction layers (`model.layers.{num_hidden_layers}` and up) are
released where the checkpoint holds what the config promises; transformers does not load them.

Source: transformers 5.24 models/deepseek_v3 and conversion_mapping.
"""

from tasks.engine.families import megatron
from tasks.engine.families.decoder import EMBEDDING, FIRST, HEAD, LAST, NORMS, mlp, published_rows
from tasks.engine.families.family import ConfigKeys, ExpertNames, Family, Row
from tasks.engine.families.moe import expert_rows, fused_experts
from tasks.engine.families.prediction import Prediction, rules_of
from tasks.engine.tensors.rules import Drop, Naming, Rule, rename

_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"

_LATENT: tuple[Row, ...] = (
    Row(f"{_ATTENTION}.q_proj.weight", ("latent_q_rows", "hidden"), "whole_q"),
    Row(f"{_ATTENTION}.q_a_proj.weight", ("q_lora", "hidden"), "q_lora"),
    Row(f"{_ATTENTION}.q_a_proj.bias", ("q_lora",), "q_lora_bias"),
    Row(f"{_ATTENTION}.q_a_layernorm.weight", ("q_lora",), "q_lora"),
    Row(f"{_ATTENTION}.q_b_proj.weight", ("latent_q_rows", "q_lora"), "q_lora"),
    Row(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", ("latent_kv_rows", "hidden")),
    Row(f"{_ATTENTION}.kv_a_proj_with_mqa.bias", ("latent_kv_rows",), "attention_bias"),
    Row(f"{_ATTENTION}.kv_a_layernorm.weight", ("kv_lora",)),
    Row(f"{_ATTENTION}.kv_b_proj.weight", ("up_kv_rows", "kv_lora")),
    Row(f"{_ATTENTION}.o_proj.weight", ("hidden", "v_rows")),
    Row(f"{_ATTENTION}.o_proj.bias", ("hidden",), "attention_bias"),
)
_ROUTER = Row(f"{_MLP}.gate.weight", ("num_experts", "hidden"), layers="sparse")
_ROUTER_BIAS = Row(f"{_MLP}.gate.e_score_correction_bias", ("num_experts",), layers="sparse")
_SHARED: tuple[Row, ...] = (
    Row(f"{_MLP}.shared_experts.gate_proj.weight", ("shared_rows", "hidden"), layers="sparse"),
    Row(f"{_MLP}.shared_experts.up_proj.weight", ("shared_rows", "hidden"), layers="sparse"),
    Row(f"{_MLP}.shared_experts.down_proj.weight", ("hidden", "shared_rows"), layers="sparse"),
)
_EXPERTS = expert_rows(f"{_MLP}.experts", "gate_proj", "up_proj", "down_proj")
_LAYER: tuple[Row, ...] = (*NORMS, *_LATENT, *mlp("dense"), _ROUTER, _ROUTER_BIAS, *_SHARED)
_ROWS: tuple[Row, ...] = (*FIRST, *_LAYER, *_EXPERTS, *LAST)
_MEGATRON_LAYER: tuple[Rule | Drop, ...] = (
    *megatron.MLP_NORM,
    *megatron.latent_attention(),
    *megatron.dense_mlp(),
    *megatron.moe(_ROUTER.name, f"{_MLP}.experts.{{expert}}", "gate_proj", "up_proj", "down_proj"),
    *rename(((megatron.ROUTER_BIAS, _ROUTER_BIAS.name),)),
    *megatron.shared_experts(f"{_MLP}.shared_experts"),
)

_L = "model.layers.{layer}"
_PREDICTION = Prediction(
    own=(
        (f"{_L}.enorm.weight", ("hidden",)),
        (f"{_L}.hnorm.weight", ("hidden",)),
        (f"{_L}.eh_proj.weight", ("hidden", "two_hidden")),
        (f"{_L}.shared_head.norm.weight", ("hidden",)),
    ),
    copies=((f"{_L}.embed_tokens.weight", ("vocab", "hidden")), (f"{_L}.shared_head.head.weight", ("vocab", "hidden"))),
    rules=rules_of(
        _MEGATRON_LAYER,
        "decoder.layers.{layer}",
        _L,
        {
            **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
            "final_layernorm.weight": "shared_head.norm.weight",
        },
    ),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    rows=_ROWS,
    namings=(
        Naming("published", published_rows(_ROWS)),
        Naming("transformers-5", (*published_rows((*FIRST, *_LAYER, *LAST)), *fused_experts(_EXPERTS))),
        # Read off Megatron's and its converters' sources, 1:1; not proven by a forward pass.
        Naming(megatron.NAMING, (*megatron.OUTSIDE, *_MEGATRON_LAYER, *megatron.prediction_layers(_MEGATRON_LAYER))),
    ),
    embedding=EMBEDDING,
    head=HEAD,
    prediction=_PREDICTION,
    config=ConfigKeys(
        defaults={
            "head_dim": 64,
            "q_lora": 1536,
            "kv_lora": 512,
            "rope_dim": 64,
            "nope_dim": 128,
            "v_dim": 128,
            "num_experts": 256,
            "num_shared_experts": 1,
            "moe_intermediate": 2048,
            "first_dense": 3,
        }
    ),
    experts=ExpertNames(_ROUTER.name, tuple(row.name for row in _EXPERTS)),
    ignore=("lm_head", r"re:.*\.mlp\.gate$"),
    keep_fp32=("*.mlp.gate.e_score_correction_bias",),
    may_keep_fp32=("*.mlp.gate.weight",),  # transformers does; the published weights do not
)
