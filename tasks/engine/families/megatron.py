"""How Megatron Core calls the tensors of decoder families; one naming fits its legacy and its torch_dist checkpoints.

Norms have two names: Transformer Engine fuses them into the linear behind them, the local implementation keeps them apart; of the two a
checkpoint has one. Q, K and V rows are one tensor, grouped by KV head; gate and up rows are one tensor.

Source: Megatron-LM core 0.12 to main, megatron/core/models/gpt/gpt_layer_specs.py; names and row orders held against checkpoints that it
wrote and the logits of the live models.
"""

import re
from collections.abc import Collection, Sequence

from tasks.engine.families.decoder import EMBEDDING, HEAD
from tasks.engine.tensors.ops import CutRows, SplitQkv, SplitRows
from tasks.engine.tensors.rules import Drop, Rule, rename

NAMING = "megatron"
_FROM = "decoder.layers.{layer}"
_TO = "model.layers.{layer}"
_ATTENTION = f"{_FROM}.self_attention"
_EXPERT = f"{_FROM}.mlp.experts.local_experts.{{expert}}"

ROUTER_BIAS = f"{_FROM}.mlp.router.expert_bias"  # fp32, added to the scores that choose experts

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


SPECS = ("local", "transformer_engine")  # Megatron's --transformer-impl
_SINGLETON = re.compile(r"_[wv]$")  # halves of a gated fc1 as torch_dist may keep them
_FUSED_NORM = re.compile(r"\.layer_norm_(weight|bias)$")


def choose_names(names: Sequence[str], present: Collection[str], spec: str) -> list[str]:
    """Return, of the names that one tensor has in different checkpoints, those that a rank's file has under a spec.

    Args:
        names: all of them.
        present: names of all tensors of the model.
        spec: one of SPECS. Transformer Engine fuses a norm into the linear behind it, where the layer has that linear.

    Returns:
        One name, as long as the table above gives each spec one.
    """
    names = [name for name in names if ".mtp_model_layer." not in name]  # what newer versions call the inner layer in memory
    fused = [name for name in names if _FUSED_NORM.search(name) and _FUSED_NORM.sub(r".weight", name) in present]
    apart = [name for name in names if not _FUSED_NORM.search(name) and not _SINGLETON.search(name)]
    return fused if fused and spec == "transformer_engine" else apart


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


def shared_experts(published: str, gate: str = "") -> tuple[Rule, ...]:
    """Return the rules of the experts that every token passes.

    Args:
        published: their published name.
        gate: that of their gate's weight; "" where they have none.

    Returns:
        Rules for the MLP, and the gate.
    """
    source = f"{_FROM}.mlp.shared_experts"
    made = gated_mlp(source, f"{published}.gate_proj", f"{published}.up_proj", f"{published}.down_proj")
    return (*made, *(rename(((f"{source}.gate_weight", gate),)) if gate else ()))


def latent_attention() -> tuple[Rule, ...]:
    """Return the rules of DeepSeek's latent attention; the inner norms have two names, like the outer ones.

    Returns:
        One to one renames.
    """
    to = f"{_TO}.self_attn"
    return rename(
        (
            (f"{_FROM}.input_layernorm.weight", f"{_TO}.input_layernorm.weight"),
            (f"{_ATTENTION}.linear_q_proj.weight", f"{to}.q_proj.weight"),
            (f"{_ATTENTION}.linear_q_down_proj.weight", f"{to}.q_a_proj.weight"),
            (f"{_ATTENTION}.linear_q_up_proj.layer_norm_weight", f"{to}.q_a_layernorm.weight"),
            (f"{_ATTENTION}.q_layernorm.weight", f"{to}.q_a_layernorm.weight"),
            (f"{_ATTENTION}.linear_q_up_proj.weight", f"{to}.q_b_proj.weight"),
            (f"{_ATTENTION}.linear_kv_down_proj.weight", f"{to}.kv_a_proj_with_mqa.weight"),
            (f"{_ATTENTION}.linear_kv_up_proj.layer_norm_weight", f"{to}.kv_a_layernorm.weight"),
            (f"{_ATTENTION}.kv_layernorm.weight", f"{to}.kv_a_layernorm.weight"),
            (f"{_ATTENTION}.linear_kv_up_proj.weight", f"{to}.kv_b_proj.weight"),
            (f"{_ATTENTION}.linear_proj.weight", f"{to}.o_proj.weight"),
        )
    )


def prediction_layers(rows: tuple[Rule | Drop, ...]) -> tuple[Drop, ...]:
    """Return the drops of multi-token prediction layers, which no release that transformers loads has.

    Args:
        rows: the rules of the decoder's layers, which their inner layer repeats.

    Returns:
        One drop per tensor, under both names of the inner layer.
    """
    because = "multi-token prediction: transformers does not load these layers"
    own = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    inner = [row.source.removeprefix(_FROM) for row in rows if row.source.startswith(_FROM)]
    return (
        *(Drop(f"mtp.layers.{{layer}}.{name}.weight", because) for name in own),
        *(Drop(f"mtp.layers.{{layer}}.{layer}{rest}", because) for layer in ("transformer_layer", "mtp_model_layer") for rest in inner),
    )
