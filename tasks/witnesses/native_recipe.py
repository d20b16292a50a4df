"""What a Megatron run computes, read from its args: the arithmetic of *native forward*, and what that does not know.

An argument that changes the arithmetic in a way this forward was not taught keeps the witness silent: it says which, and proves nothing.

Source: Megatron-LM core 0.12 to main, megatron/core/transformer/transformer_config.py, models/common/embeddings/rotary_pos_embedding.py,
transformer/moe/moe_utils.py (`topk_routing_with_score_function`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.megatron_ranks import Args, argument

Activation = Callable[[torch.Tensor], torch.Tensor]

# Argument → values under which this forward is right, and what another one means. An argument the run has not is harmless.
_UNTAUGHT: Mapping[str, tuple[tuple[object, ...], str]] = {
    "multi_latent_attention": ((None, False), "latent attention"),
    "experimental_attention_variant": ((None,), "another attention"),
    "linear_attention_freq": ((None,), "linear attention"),
    "attention_output_gate": ((None, False), "an output gate in the attention"),
    "window_size": ((None,), "sliding windows"),
    "softmax_type": ((None, "vanilla"), "another softmax in the attention"),
    "qk_l2_norm": ((None, False), "L2 norms of Q and K"),
    "no_rope_freq": ((None,), "layers without positions"),
    "rotary_interleaved": ((None, False), "rotary pairs"),
    "normalization": (("LayerNorm", "RMSNorm"), "another norm"),
    "layernorm_zero_centered_gamma": ((None, False), "norm weights stored minus one"),
    "apply_layernorm_1p": ((None, False), "norm weights stored minus one"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals that branch off behind the norms"),
    "position_embedding_type": (("rope", "learned_absolute", "none"), "other positions"),
    "quick_geglu": ((None, False), "quick GELU"),
    "activation_func_clamp_value": ((None,), "clamped activations"),
    "glu_linear_offset": ((None, 0.0), "an offset in the gated MLP"),
    "use_mup": ((None, False), "maximal update scaling"),
    "heterogeneous_layers_config_path": ((None,), "layers of several kinds"),
    "heterogeneous_layers_config_encoded_json": ((None,), "layers of several kinds"),
    "moe_router_score_function": ((None, "softmax"), "a router without softmax"),
    "moe_router_num_groups": ((None,), "experts chosen by group"),
    "moe_router_enable_expert_bias": ((None, False), "a router bias"),
    "moe_apply_probs_on_input": ((None, False), "router weights on the experts' input"),
    "moe_expert_capacity_factor": ((None,), "experts of limited capacity"),
    "moe_latent_size": ((None,), "experts in a latent space"),
    "moe_mlp_glu_interleave_size": ((None,), "alternating gate and up rows"),
    "moe_shared_expert_glu_interleave_size": ((None,), "alternating gate and up rows"),
}
_NEEDED = ("position_embedding_type", "normalization", "swiglu")  # no default of any version is guessed
# Constants of Megatron's Llama 3.1 scaling, which args do not state.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arithmetic of a run. `rotary` are the dims of a head that are rotated, 0 for none; `theta`, `stretch` and `factor` say how:
    positions are divided by `stretch`, and frequencies scaled as Llama 3.1's by `factor` where it is not 0. `topk` is 0 without experts.
    """

    num_heads: int
    groups: int
    head_dim: int
    norm: Literal["LayerNorm", "RMSNorm"]
    eps: float
    rotary: int
    theta: float
    stretch: float
    factor: float
    is_gated: bool
    activation: Activation
    topk: int
    softmax_first: bool
    router_scale: float

    def rotations(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what Q and K are rotated by.

        Args:
            length: positions S.

        Returns:
            Cosines and sines, (S, R) each, both halves alike.
        """
        frequencies = 1.0 / self.theta ** (torch.arange(0, self.rotary, 2, dtype=torch.float32) / self.rotary)
        if self.factor:
            frequencies = _llama3(frequencies, self.factor)
        angles = torch.outer(torch.arange(length, dtype=torch.float32) / self.stretch, frequencies)
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()


def read_recipe(args: Args) -> Recipe:
    """Return what a run computes.

    Args:
        args: its arguments.

    Returns:
        The recipe.

    Raises:
        NotHeardError: something this forward was not taught, or args that leave it open.
    """
    open_ = [name for name in _NEEDED if args.get(name) is None]
    if open_:
        raise NotHeardError(f"args do not say {', '.join(open_)}")
    strange = [f"{name}={args[name]!r} ({why})" for name, (taught, why) in _UNTAUGHT.items() if name in args and args[name] not in taught]
    if strange:
        raise NotHeardError(f"the run computes what this forward was not taught: {strange[0]}")
    heads = _count(args, "num_attention_heads")
    head_dim = _count(args, "kv_channels")
    has_experts = argument(args, "num_experts") is not None
    positions = argument(args, "position_embedding_type")
    return Recipe(
        num_heads=heads,
        groups=_count(args, "num_query_groups") if args.get("group_query_attention") else heads,
        head_dim=head_dim,
        norm="LayerNorm" if args.get("normalization") == "LayerNorm" else "RMSNorm",
        eps=_number(args, "layernorm_epsilon", None),
        rotary=int(head_dim * _number(args, "rotary_percent", 1.0)) if positions == "rope" else 0,
        theta=_number(args, "rotary_base", 10000.0),
        stretch=_number(args, "rotary_seq_len_interpolation_factor", 1.0),
        factor=_number(args, "rope_scaling_factor", 8.0) if args.get("use_rope_scaling") else 0.0,
        is_gated=bool(args.get("swiglu")),
        activation=_activation(args),
        topk=_count(args, "moe_router_topk") if has_experts else 0,
        softmax_first=bool(args.get("moe_router_pre_softmax")),
        router_scale=_number(args, "moe_router_topk_scaling_factor", 1.0),
    )


def _count(args: Args, name: str) -> int:
    value = argument(args, name)
    if type(value) is not int or value < 1:
        raise NotHeardError(f"args.{name} is {value!r}, not a count")
    return value


def _number(args: Args, name: str, default: float | None) -> float:
    value = argument(args, name)
    value = default if value is None else value
    if type(value) not in (int, float):
        raise NotHeardError(f"args.{name} is {value!r}, not a number")
    return float(value)  # type: ignore[arg-type]  # narrowed by its exact type


def _activation(args: Args) -> Activation:
    if args.get("swiglu"):
        return functional.silu
    if args.get("squared_relu"):
        return lambda x: functional.relu(x) ** 2
    is_tanh = args.get("bias_gelu_fusion") or args.get("openai_gelu")  # the fused kernel computes the tanh form
    return lambda x: functional.gelu(x, approximate="tanh" if is_tanh else "none")


def _llama3(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    # Long waves are slowed down by the factor, short ones kept, those between blended.
    wavelengths = 2 * math.pi / frequencies
    blend = (_ORIGINAL / wavelengths - _LOW) / (_HIGH - _LOW)
    between = (1 - blend) * frequencies / factor + blend * frequencies
    slowed = torch.where(wavelengths > _ORIGINAL / _LOW, frequencies / factor, frequencies)
    is_between = (wavelengths >= _ORIGINAL / _HIGH) & (wavelengths <= _ORIGINAL / _LOW)
    return torch.where(is_between, between, slowed)
