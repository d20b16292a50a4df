"""The order in which Megatron Core's models hold their parameters, by name: that of `named_parameters()` and of state dicts.

Source: Megatron-LM core 0.12 to main, megatron/core/models/gpt/gpt_model.py, transformer/{transformer_layer,attention,mlp}.py,
transformer/moe/moe_layer.py; Transformer Engine's fused linears hold the norm before the weight.
"""

import re

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
FIRST, LAST = "embedding.", ("decoder.final_layernorm.", "output_layer.", "mtp.")
# Inside a layer, by the beginning of what is behind the layer's number.
_ORDER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.linear_q", "self_attention.linear_kv"),
    *("self_attention.q_layernorm", "self_attention", "pre_mlp_layernorm", "mlp.router", "mlp.linear", "mlp.experts", "mlp.shared_experts"),
)


def place_in_model(name: str) -> tuple[int, int, int, int, str]:
    """Return a sort key: a parameter's place in its model.

    Args:
        name: a parameter, layers and experts numbered.

    Returns:
        The key.
    """
    match = LAYER.match(name)
    if match is None:
        return (0 if name.startswith(FIRST) else 2, 0, 0, 0, "" if name == EMBEDDING else _behind_weight(name))
    rest = name[match.end() :]
    expert = LOCAL_EXPERT.search(rest)
    place = next((at for at, beginning in enumerate(_ORDER) if rest.startswith(beginning)), len(_ORDER))
    return 1, int(match[1]), place, int(expert[1]) if expert else 0, _behind_weight(rest)


def _behind_weight(name: str) -> str:
    # A bias comes behind its weight.
    return name.replace("layer_norm_bias", "layer_norm_weight~").replace(".bias", ".~bias")
