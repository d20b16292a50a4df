"""What a Megatron run would say of itself that trained a model: the `args` of checkpoints that are written, from the model's config.

They name what shapes and arithmetic follow from, and how the run is cut; no optimizer, data or schedule, which a run that goes on from
these weights sets itself.

Refused: RoPE types whose settings Megatron has no argument for, and constants of Llama 3.1's scaling other than Megatron's own.

Source: Megatron-LM core 0.12 to main, megatron/training/arguments.py; `norm_epsilon` is called `layernorm_epsilon` since core 0.16.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from reports.errors import RequestError
from tasks.engine.families.dims import Config, Dims
from tasks.engine.planning.megatron_ranks import RankLayout
from tasks.engine.planning.stated import word_of_config

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # constants of Megatron's


@dataclass(frozen=True, slots=True)
class RunOf:
    """A model and how it is cut. `spec` is a --transformer-impl; `vocab_multiple` a --make-vocab-size-divisible-by;
    `predicts` are prediction layers.
    """

    family: str
    config: Config
    dims: Dims
    layout: RankLayout
    spec: str
    vocab_multiple: int
    predicts: int = 0


def arguments_of(run: RunOf) -> dict[str, object]:
    """Return the arguments of such a run, dtypes left out.

    Args:
        run: the model, and its cut.

    Returns:
        Values by argument.

    Raises:
        RequestError: positions that no argument describes.
    """
    layout, sizes = run.layout, run.dims.sizes
    padded = -(-sizes["vocab"] // (run.vocab_multiple * layout.tp)) * run.vocab_multiple * layout.tp
    return {
        **{name: sizes[size] for name, size in _SIZES.items() if size in sizes},
        "group_query_attention": sizes["num_kv_heads"] != sizes["num_heads"],
        "seq_length": sizes.get("positions"),
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": run.vocab_multiple,
        "untie_embeddings_and_output_weights": not run.dims.is_tied,
        **_architecture(run),
        **dict(_experts(run)),
        **_latent(run),
        **({"mtp_num_layers": run.predicts} if run.predicts else {}),
        "transformer_impl": run.spec,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        **_stages(layout),
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": 1,
        "world_size": layout.world,
        "ckpt_format": "torch",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def _stages(layout: RankLayout) -> dict[str, object]:
    # Of uneven stages: two numbers where only the first and the last are apart, else Megatron's own spelling of a layout.
    counts = layout.layers
    if len(set(counts)) < 2:
        return {}
    if layout.vpp == 1 and len(set(counts[1:-1])) < 2:
        return {"decoder_first_pipeline_num_layers": counts[0], "decoder_last_pipeline_num_layers": counts[-1]}
    return {"pipeline_model_parallel_layout": f"E{'|'.join('t' * count for count in counts)}L"}


_SIZES: Mapping[str, str] = {
    "num_layers": "num_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate",
    "max_position_embeddings": "positions",
    "vocab_size": "vocab",
}


def _architecture(run: RunOf) -> dict[str, object]:
    eps = word_of_config("eps", run.config, run.dims)
    common: dict[str, object] = {"layernorm_epsilon": eps, "norm_epsilon": eps}
    if run.family == "gpt2":
        is_tanh = word_of_config("gelu", run.config, run.dims) == "tanh"
        return common | {
            **{"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "swiglu": False},
            **{"add_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": False, "bias_gelu_fusion": is_tanh},
        }
    has_bias = any(run.dims.flags.get(flag) for flag in ("qkv_bias", "attention_bias")) or run.family == "qwen2"
    return common | {
        **{"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False},
        **{"add_qkv_bias": has_bias, "qk_layernorm": run.family in ("qwen3", "qwen3_moe", "deepseek_v3")},
        **_rope(run.config),
    }


def _rope(config: Config) -> dict[str, object]:
    held = next((config[key] for key in ("rope_parameters", "rope_scaling") if isinstance(config.get(key), Mapping)), {})
    assert isinstance(held, Mapping)
    kind = held.get("rope_type", held.get("type", "default"))
    made: dict[str, object] = {
        **{"rotary_base": held.get("rope_theta", config.get("rope_theta", 10000.0)), "rotary_percent": 1.0, "rotary_interleaved": False},
        **{"use_rope_scaling": kind == "llama3", "rotary_seq_len_interpolation_factor": held.get("factor") if kind == "linear" else None},
    }
    others = {key: held.get(key) for key, value in _LLAMA3.items() if held.get(key) != value} if kind == "llama3" else {}
    if kind not in ("default", "linear", "llama3") or others:
        what = f"rope_type {kind!r}" + (f" with {others}" if others else "")
        raise RequestError(
            f"Megatron has no arguments for {what}", where="config.json", remedy="Give a config with positions as they were trained."
        )
    return made | ({"rope_scaling_factor": held.get("factor")} if kind == "llama3" else {})


def _experts(run: RunOf) -> Iterator[tuple[str, object]]:
    sizes, config = run.dims.sizes, run.config
    if "num_experts" not in sizes:
        return
    sparse = [int(run.dims.is_sparse(layer)) for layer in range(run.dims.num_layers)]
    yield "num_experts", sizes["num_experts"]
    yield "moe_ffn_hidden_size", sizes["moe_intermediate"]
    yield "moe_layer_freq", 1 if all(sparse) else sparse
    yield "moe_grouped_gemm", False
    yield "moe_router_topk", config.get("num_experts_per_tok")
    yield from _ROUTERS[run.family](config).items()
    shared = sizes.get("shared_intermediate") or sizes.get("shared_rows")
    if shared:
        yield "moe_shared_expert_intermediate_size", shared
        yield "moe_shared_expert_gate", run.family == "qwen2_moe"


def _deepseek_router(config: Config) -> dict[str, object]:
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_router_num_groups": config.get("n_group"),
        "moe_router_group_topk": config.get("topk_group"),
    }


def _softmax_router(config: Config) -> dict[str, object]:
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not config.get("norm_topk_prob", False)}


_ROUTERS: Mapping[str, Callable[[Config], dict[str, object]]] = {
    "mixtral": lambda _: {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False},
    "qwen2_moe": _softmax_router,
    "qwen3_moe": _softmax_router,
    "deepseek_v3": _deepseek_router,
}


def _latent(run: RunOf) -> dict[str, object]:
    sizes = run.dims.sizes
    if "kv_lora" not in sizes:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": sizes.get("q_lora"),
        "kv_lora_rank": sizes["kv_lora"],
        "qk_head_dim": sizes["nope_dim"],
        "qk_pos_emb_head_dim": sizes["rope_dim"],
        "v_head_dim": sizes["v_dim"],
    }
