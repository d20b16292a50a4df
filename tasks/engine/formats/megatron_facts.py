"""What a run's args say of the model, in words that a config can be held against.

Sizes and the tie flag are called as in families.dims; the others as in `tasks.engine.planning.stated` and `planning.derive`.

Source: Megatron-LM core 0.12 to main, megatron/training/arguments.py; `norm_epsilon` is called `layernorm_epsilon` since core 0.16.
"""

from collections.abc import Callable, Iterator, Mapping

from tasks.engine.tensors.catalog import Fact

Args = Mapping[str, object]
_ABSENT = object()


def stated_facts(args: Args) -> dict[str, Fact]:
    """Return what args say of the model.

    Args:
        args: a run's arguments.

    Returns:
        Word → value; words that args leave open are absent.
    """
    return dict(_facts(args))


def _facts(args: Args) -> Iterator[tuple[str, Fact]]:
    for word, name in _PLAIN.items():
        value = args.get(name)
        if type(value) in (int, float):
            yield word, value  # type: ignore[misc]  # narrowed by its exact type
    for word, read in _DERIVED.items():
        fact = read(args)
        if fact is not None:
            yield word, fact


def _kv_heads(args: Args) -> Fact | None:
    name = "num_query_groups" if args.get("group_query_attention") else "num_attention_heads"
    value = args.get(name)
    return value if type(value) is int else None


def _dense_width(args: Args) -> Fact | None:
    value = args.get("ffn_hidden_size")
    return value if type(value) is int and not args.get("num_experts") else None


def _expert_width(args: Args) -> Fact | None:
    value = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size")
    return value if type(value) is int and args.get("num_experts") else None


def _eps(args: Args) -> Fact | None:
    value = next((args[name] for name in ("layernorm_epsilon", "norm_epsilon") if args.get(name) is not None), None)
    return value if isinstance(value, float) else None


def _theta(args: Args) -> Fact | None:
    value = args.get("rotary_base")
    return float(value) if isinstance(value, (int, float)) and args.get("position_embedding_type") == "rope" else None


def _tie(args: Args) -> Fact | None:
    value = args.get("untie_embeddings_and_output_weights")
    return not value if isinstance(value, bool) else None


def _rope_type(args: Args) -> Fact | None:
    if (
        args.get("position_embedding_type") != "rope"
        or args.get("multi_latent_attention")
        or args.get("rotary_seq_len_interpolation_factor")
    ):
        return None
    value = args.get("use_rope_scaling")
    return {True: "llama3", False: "default"}[value] if isinstance(value, bool) else None


def _norm_topk(args: Args) -> Fact | None:
    value = args.get("moe_router_pre_softmax")
    is_softmax = args.get("moe_router_score_function", "softmax") == "softmax"
    return not value if isinstance(value, bool) and args.get("num_experts") and is_softmax else None


def _gelu(args: Args) -> Fact | None:
    # Of MLPs that are not gated: the fused kernel computes the tanh form.
    if args.get("swiglu", _ABSENT) is not False or args.get("squared_relu") or args.get("quick_geglu"):
        return None
    return "tanh" if args.get("bias_gelu_fusion") or args.get("openai_gelu") else "erf"


# Word → the argument that says it.
_PLAIN: Mapping[str, str] = {
    "hidden": "hidden_size",
    "num_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "num_experts": "num_experts",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "shared_intermediate": "moe_shared_expert_intermediate_size",
}
_DERIVED: Mapping[str, Callable[[Args], Fact | None]] = {
    "num_kv_heads": _kv_heads,
    "head_dim": lambda args: None if args.get("multi_latent_attention") else _whole(args.get("kv_channels")),
    "intermediate": _dense_width,
    "moe_intermediate": _expert_width,
    "tie_word_embeddings": _tie,
    "eps": _eps,
    "rope_theta": _theta,
    "rope_type": _rope_type,
    "experts_per_token": lambda args: _whole(args.get("moe_router_topk")) if args.get("num_experts") else None,
    "norm_topk": _norm_topk,
    "gelu": _gelu,
    "rope_factor": lambda args: _number(args.get("rope_scaling_factor")) if args.get("use_rope_scaling") else None,
    "position": lambda args: _text(args.get("position_embedding_type")),
    "norm": lambda args: _text(args.get("normalization")),
    "is_gated": lambda args: _flag(args.get("swiglu")),
    "has_bias": lambda args: _flag(args.get("add_bias_linear")),
    "has_qkv_bias": lambda args: _flag(args.get("add_qkv_bias")),
    "has_qk_norm": lambda args: _flag(args.get("qk_layernorm")),
    "spec": lambda args: _text(args.get("transformer_impl")),
    "vocab_multiple": lambda args: _whole(args.get("make_vocab_size_divisible_by")),
    "all_sparse": lambda args: args.get("moe_layer_freq", 1) == 1 if args.get("num_experts") else None,
}


def _whole(value: object) -> Fact | None:
    return value if type(value) is int else None


def _number(value: object) -> Fact | None:
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]  # narrowed by its exact type


def _text(value: object) -> Fact | None:
    return value if isinstance(value, str) else None


def _flag(value: object) -> Fact | None:
    return value if isinstance(value, bool) else None
