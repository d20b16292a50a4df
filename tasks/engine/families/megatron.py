"""How Megatron Core calls the tensors of decoder families; one naming fits its legacy and its torch_dist checkpoints.

Norms have two names: Transformer Engine fuses them into the linear behind them, the local implementation keeps them apart; of the two a
checkpoint has one. Q, K and V rows are one tensor, grouped by KV head; gate and up rows are one tensor.

Source: Megatron-LM core 0.12 to main, megatron/core/models/gpt/gpt_layer_specs.py; names and row orders held against checkpoints that it
wrote and the logits of the live models.
"""

from tasks.engine.families.decoder import EMBEDDING, HEAD
from tasks.engine.tensors.ops import CutRows, SplitQkv, SplitRows
from tasks.engine.tensors.rules import Drop, Rule, rename

NAMING = "megatron"
_FROM = "decoder.layers.{layer}"
_TO = "model.layers.{layer}"
_ATTENTION = f"{_FROM}.self_attention"
_EXPERT = f"{_FROM}.mlp.experts.local_experts.{{expert}}"

OUTSIDE: tuple[Rule | Drop, ...] = (
    Rule("embedding.word_embeddings.weight", (EMBEDDING,), CutRows("vocab")),
    Rule("output_layer.weight", (HEAD,), CutRows("vocab")),
    *rename((("decoder.final_layernorm.weight", "model.norm.weight"),)),
    Drop("rotary_pos_emb.inv_freq", "rotary frequencies are recomputed from the config"),
)
INPUT_NORM: tuple[Rule, ...] = rename(
    (
        (f"{_FROM}.input_layernorm.weight", f"{_TO}.input_layernorm.weight"),
        (f"{_ATTENTION}.linear_qkv.layer_norm_weight", f"{_TO}.input_layernorm.weight"),
    )
)
MLP_NORM: tuple[Rule, ...] = rename(
    (
        (f"{_FROM}.pre_mlp_layernorm.weight", f"{_TO}.post_attention_layernorm.weight"),
        (f"{_FROM}.mlp.linear_fc1.layer_norm_weight", f"{_TO}.post_attention_layernorm.weight"),
    )
)
QKV: tuple[Rule, ...] = tuple(
    Rule(
        f"{_ATTENTION}.linear_qkv.{part}",
        tuple(f"{_TO}.self_attn.{letter}_proj.{part}" for letter in "qkv"),
        SplitQkv(rope_pairs=False),
    )
    for part in ("weight", "bias")
)
OUTPUT: tuple[Rule, ...] = rename(
    tuple((f"{_ATTENTION}.linear_proj.{part}", f"{_TO}.self_attn.o_proj.{part}") for part in ("weight", "bias"))
)
QK_NORMS: tuple[Rule, ...] = rename(
    tuple((f"{_ATTENTION}.{letter}_layernorm.weight", f"{_TO}.self_attn.{letter}_norm.weight") for letter in "qk")
)
BLOCK: tuple[Rule | Drop, ...] = (*OUTSIDE, *INPUT_NORM, *MLP_NORM, *QKV, *OUTPUT)


def gated_mlp(source: str, gate: str, up: str, down: str, parts: tuple[str, ...] = ("weight",)) -> tuple[Rule, ...]:
    """Return the rules of a gated MLP.

    Args:
        source: Megatron's name of the MLP.
        gate: published name of the gate projection, without `.weight`.
        up: that of the up projection.
        down: that of the down projection.
        parts: "weight", and "bias" where there are biases.

    Returns:
        Rules for both linears; gate and up may be two tensors, as torch_dist's singleton shards are.
    """
    return tuple(
        rule
        for part in parts
        for rule in (
            Rule(f"{source}.linear_fc1.{part}", (f"{gate}.{part}", f"{up}.{part}"), SplitRows()),
            *rename(((f"{source}.linear_fc1.{part}_w", f"{gate}.{part}"), (f"{source}.linear_fc1.{part}_v", f"{up}.{part}"))),
            Rule(f"{source}.linear_fc2.{part}", (f"{down}.{part}",)),
        )
    )


def dense_mlp(parts: tuple[str, ...] = ("weight",)) -> tuple[Rule, ...]:
    """Return the rules of a dense layer's gated MLP.

    Args:
        parts: "weight", and "bias" where there are biases.

    Returns:
        Rules for both linears.
    """
    return gated_mlp(f"{_FROM}.mlp", f"{_TO}.mlp.gate_proj", f"{_TO}.mlp.up_proj", f"{_TO}.mlp.down_proj", parts)


def moe(router: str, expert: str, gate: str, up: str, down: str) -> tuple[Rule | Drop, ...]:
    """Return the rules of an MoE layer.

    Args:
        router: published name of the router's weight.
        expert: published name of one expert, `{expert}` in it.
        gate: the last component of its gate projection.
        up: that of its up projection.
        down: that of its down projection.

    Returns:
        Rules for router and experts, and the drops.
    """
    return (
        Rule(f"{_FROM}.mlp.router.weight", (router,)),
        *gated_mlp(_EXPERT, f"{expert}.{gate}", f"{expert}.{up}", f"{expert}.{down}"),
        Drop(f"{_FROM}.mlp.router.local_tokens_per_expert", "a counter of the load balancing, not a weight"),
    )
