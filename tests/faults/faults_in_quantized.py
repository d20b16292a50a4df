"""Planted faults of quantized weights. Numbers in comments are rows of the public catalogue."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.builders.editing import Tensors, edit_json
from tests.builders.quantized import ENCODINGS, quantize_weight
from tests.faults.faults_in_structure import EXPERTS, config, copy, remove
from tests.faults.faults_in_weights import assign, both, leave, swap, tensors
from tests.faults.planting import Fault
from validators.expectation import Evidence

MLP = "model.layers.1.mlp."
UP = f"{MLP}up_proj"
ROUTER = "model.layers.0.mlp.gate"
INT4, INT8, FP8, BLOCKS, MOE = "dense int4", "dense int8", "dense fp8", "router_bias fp8", "moe int4"
EXPERT = f"{EXPERTS}2.down_proj"
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def settings(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Return a planter that changes the quantization_config."""
    return lambda folder: edit_json(folder / "config.json", lambda value: change(value["quantization_config"]))


def group(**fields: object) -> Callable[[Path], None]:
    """Return a planter that sets fields of the config group."""
    return settings(lambda said: said["config_groups"]["group_0"].update(fields))


def target(*patterns: str) -> Callable[[Path], None]:
    """Return a planter that sets what the config group targets."""
    return group(targets=list(patterns))


def scheme(**fields: object) -> Callable[[Path], None]:
    """Return a planter that sets fields of the config group's weights."""
    return settings(lambda said: said["config_groups"]["group_0"]["weights"].update(fields))


def ignore(*patterns: str) -> Callable[[Path], None]:
    """Return a planter that sets the ignore list."""
    return settings(lambda said: said.update(ignore=list(patterns)))


def quantize(encoding: str, *modules: str) -> Callable[[Path], None]:
    """Return a planter that stores modules in parts."""

    def change(held: Tensors) -> None:
        for module in modules:
            parts = quantize_weight(held.pop(f"{module}.weight"), ENCODINGS[encoding])
            held.update({f"{module}.{suffix}": part for suffix, part in parts.items()})

    return tensors(change)


def restore(module: str, like: str) -> Callable[[Path], None]:
    """Return a planter that stores a module whole, of the shape of another tensor."""

    def change(held: Tensors) -> None:
        for name in [name for name in held if name.startswith(f"{module}.")]:
            held.pop(name)
        held[f"{module}.weight"] = torch.randn(held[like].shape, generator=torch.Generator().manual_seed(5)) / 8

    return tensors(change)


def shift_zero_points(held: Tensors) -> None:
    # Every zero point one higher: eight of four bits in a word, none of them the largest.
    words = held[f"{UP}.weight_zero_point"]
    held[f"{UP}.weight_zero_point"] = words + 0x11111111


def add_zero_points(held: Tensors) -> None:
    for name in [name for name in held if name.endswith("weight_scale")]:
        zeros = torch.zeros(held[name].shape, dtype=torch.int8)
        held[name.replace("weight_scale", "weight_zero_point")] = zeros + 9 if name.startswith(UP) else zeros


def forget_calibration(held: Tensors) -> None:
    held.update({name: torch.ones(1) for name in held if name.endswith(("k_scale", "v_scale"))})


def rename(before: str, after: str) -> Callable[[Path], None]:
    """Return a planter that renames one tensor."""
    return tensors(lambda held: held.update({after: held.pop(before)}))


def exchange_nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return packed words with the two values of every byte exchanged."""
    packed = words.contiguous().view(torch.uint8)
    return ((packed >> 4) | (packed << 4)).view(torch.int32)


def exchange_halves(scales: torch.Tensor) -> torch.Tensor:
    """Return scales whose first half of rows stands last, as two ranks' in the wrong order."""
    return scales.roll(scales.shape[0] // 2, 0)


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as int4 leaves it, in its own dtype: nothing in the headers shows that it was quantized."""
    scales = weight.abs().amax(1, keepdim=True) / 7.5
    return (weight / scales).round().clamp(-8, 7) * scales


def pass_off_packed_words(held: Tensors) -> None:
    """Store packed int4 words under the weight's own name, called bf16."""
    words = quantize_weight(held[f"{UP}.weight"], ENCODINGS["int4_group"])["weight_packed"]
    held[f"{UP}.weight"] = words.view(torch.bfloat16)


def lose_comparison(evidence: Evidence) -> Evidence:
    """Return evidence in which one weight could not be held against the source."""
    assert evidence.parts is not None
    parts = evidence.parts.copy()
    parts.loc[parts["name"] == f"{UP}.weight", "relative_error"] = math.nan
    return replace(evidence, parts=parts)


def entry(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of one row of scales."""

    def change(scales: torch.Tensor) -> torch.Tensor:
        changed = scales.clone()
        changed[row] = value
        return changed

    return change


DECLARED = (
    Fault("fp8_without_config", FP8, "quantized.undeclared", config(quantization_config=None)),  # 69
    Fault("int4_without_config", INT4, "quantized.undeclared", config(quantization_config=None)),
    Fault("one_fp8_tensor_in_a_whole_model", "dense", "quantized.undeclared", assign(f"{UP}.weight", lambda t: t.to(torch.float8_e4m3fn))),
    Fault("group_size_of_no_number", INT4, "quantized.config-unreadable", scheme(group_size="eight")),
    Fault("ignore_pattern_malformed", INT8, "quantized.config-unreadable", ignore("lm_head", "re:*(")),
    Fault("ignore_pattern_that_takes_forever", INT8, "quantized.config-unreadable", ignore("lm_head", "re:(.*a)+$")),
    Fault("fp8_of_four_bits", FP8, "quantized.config-unreadable", scheme(num_bits=4)),
    Fault("packed_floats", MOE, "quantized.config-unreadable", scheme(type="float")),
    Fault("method_unnamed", INT8, "quantized.config-unreadable", settings(lambda said: said.pop("quant_method"))),
    Fault("declared_in_a_list", INT4, "quantized.config-unreadable", config(quantization_config=["int4"])),
    Fault("said_to_be_initialized", FP8, "quantized.status", settings(lambda said: said.update(quantization_status="initialized"))),
    Fault("method_unheard_of", INT8, "quantized.not-judged", settings(lambda said: said.update(quant_method="quark"))),
    Fault("config_of_a_quantized_model", "dense", "quantized.nothing", config(quantization_config={"quant_method": "fp8"})),
)

CHOSEN = (
    Fault("layer_left_whole", INT4, "quantized.not-quantized", restore(UP, "model.layers.1.mlp.gate_proj.weight_packed")),  # 67
    Fault("head_not_ignored", FP8, "quantized.not-quantized", ignore()),  # 67
    Fault("head_ignored_under_another_name", FP8, "quantized.not-quantized", ignore("model.lm_head")),  # 67
    Fault("layer_ignored_under_another_name", INT8, "quantized.ignore-unmatched", ignore("lm_head", "model.layers.0.mlp.gate_up")),  # 67
    Fault("ignore_pattern_too_narrow", INT8, "quantized.pattern-unmatched", ignore("lm_head", "re:.*vision_tower.*")),
    Fault("head_quantized_but_ignored", FP8, "quantized.ignored", quantize("fp8_channel", "lm_head")),  # 73
    Fault(
        "layer_quantized_but_ignored",
        BLOCKS,
        "quantized.ignored",
        settings(lambda said: said.update(modules_to_not_convert=["model.layers.1.mlp"])),
    ),
    Fault(
        "head_quantized_and_not_targeted",
        INT8,
        "quantized.untargeted",
        both(target(r"re:model\.layers\..*_proj$"), ignore(), quantize("int8_w8a8", "lm_head")),
    ),  # 73
    Fault("router_quantized", MOE, "quantized.ignored", quantize("int4_group", ROUTER)),
    Fault("router_quantized_and_not_ignored", BLOCKS, "quantized.must-not", quantize("fp8_inverse", ROUTER)),
    Fault("embedding_quantized", INT8, "quantized.must-not", quantize("int8_w8a8", "model.embed_tokens")),
)

PARTS = (
    Fault("scale_lost", FP8, "quantized.part-missing", remove(f"{UP}.weight_scale")),  # 68
    Fault("inverse_scale_lost", BLOCKS, "quantized.part-missing", remove(f"{EXPERT}.weight_scale_inv")),  # 70
    Fault("zero_points_lost", INT4, "quantized.part-missing", remove(f"{UP}.weight_zero_point")),
    Fault("packed_values_lost", MOE, "quantized.part-missing", remove(f"{EXPERT}.weight_packed")),
    Fault("static_input_scale_lost", FP8, "quantized.part-missing", group(input_activations=STATIC)),
    Fault(
        "inverse_scale_in_place_of_a_scale", FP8, "quantized.part-unexpected", rename(f"{UP}.weight_scale", f"{UP}.weight_scale_inv")
    ),  # 70
    Fault("int8_under_a_config_of_fp8", INT8, "quantized.dtype", scheme(type="float")),
    Fault("scale_in_integers", FP8, "quantized.dtype", assign(f"{UP}.weight_scale", lambda t: t.to(torch.int32))),
    Fault("group_size_wrong", INT4, "quantized.shape", scheme(group_size=16)),
    Fault("strategy_wrong", INT8, "quantized.shape", scheme(strategy="tensor")),
    Fault("bits_wrong", MOE, "quantized.shape", scheme(num_bits=8)),
    Fault("scale_of_one_rank", FP8, "quantized.shape", assign(f"{UP}.weight_scale", lambda t: t[:48])),
    Fault("scale_transposed", INT4, "quantized.transposed", assign(f"{UP}.weight_scale", lambda t: t.T)),  # 74
    Fault("block_scale_transposed", BLOCKS, "quantized.transposed", assign(f"{EXPERT}.weight_scale_inv", lambda t: t.T)),  # 74
    Fault("shape_of_another_weight", INT4, "quantized.listed-shape", swap((f"{UP}.weight_shape", f"{MLP}down_proj.weight_shape"))),
    Fault("shape_cut", MOE, "quantized.listed-shape", assign(f"{EXPERT}.weight_shape", lambda t: t - 1)),
)

VALUES = (
    Fault("int4_layer_of_zeros", MOE, "finite.all-zero", assign(f"{EXPERT}.weight_packed", lambda t: torch.full_like(t, -0x77777778))),
    Fault("scale_nan", INT8, "quantized.scale-nonfinite", assign(f"{UP}.weight_scale", entry(7, float("nan")))),
    Fault("scale_infinite", BLOCKS, "quantized.scale-nonfinite", assign(f"{EXPERT}.weight_scale_inv", entry(1, float("inf")))),
    Fault("block_scale_inverted", BLOCKS, "quantized.scale-size", assign(f"{EXPERT}.weight_scale_inv", lambda t: 1 / t)),  # 70
    Fault("scale_inverted", INT8, "quantized.scale-size", assign(f"{UP}.weight_scale", lambda t: 1 / t)),
    Fault("scale_negative", INT4, "quantized.scale-sign", assign(f"{UP}.weight_scale", entry(3, -0.01))),
    Fault("scale_zero", FP8, "quantized.scale-sign", assign(f"{UP}.weight_scale", entry(0, 0.0))),
    Fault("zero_points_beyond_the_bits", INT8, "quantized.zero-point", both(scheme(num_bits=4, symmetric=False), tensors(add_zero_points))),
    Fault("zero_points_off_by_one", INT4, "quantized.error", tensors(shift_zero_points)),  # 71
    Fault("scale_of_another_tensor", FP8, "quantized.error", copy(f"{MLP}gate_proj.weight_scale", f"{UP}.weight_scale")),
    Fault(
        "scale_of_another_expert",
        BLOCKS,
        "quantized.error",
        copy(f"{EXPERTS}1.up_proj.weight_scale_inv", f"{EXPERTS}2.up_proj.weight_scale_inv"),
    ),
    Fault(
        "scales_of_two_layers_exchanged",
        MOE,
        "quantized.error",
        swap(("layers.0.self_attn.k_proj.weight_scale", "layers.1.self_attn.k_proj.weight_scale")),
    ),
    Fault("values_of_another_layer", INT8, "quantized.error", copy("layers.2.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight")),
    Fault("scales_doubled", FP8, "quantized.error", assign(f"{UP}.weight_scale", lambda t: t * 2)),
    Fault("scales_of_the_wrong_half", INT8, "quantized.error", assign(f"{UP}.weight_scale", exchange_halves)),
    Fault("nibbles_exchanged", MOE, "quantized.error", assign(f"{EXPERT}.weight_packed", exchange_nibbles)),
    Fault("int4_passed_off_as_whole", "dense", "values.differing", assign(f"{UP}.weight", round_to_int4)),
    Fault("packed_words_passed_off_as_bf16", "dense", "shapes.wrong", tensors(pass_off_packed_words)),
    Fault("scales_coarse", INT4, "quantized.calibrated-error", assign(f"{UP}.weight_scale", lambda t: t * 1.14)),
    Fault("weight_not_in_the_source", INT8, "quantized.not-compared", leave, amend=lose_comparison),
)

CACHE = (
    Fault("cache_scales_lost", FP8, "quantized.cache-missing", remove(".v_scale")),  # 72
    Fault(
        "cache_promised_and_not_calibrated", INT8, "quantized.cache-missing", settings(lambda said: said.update(kv_cache_scheme=STATIC))
    ),  # 72
    Fault("cache_scales_all_one", FP8, "quantized.cache-ones", tensors(forget_calibration)),  # 72
    Fault("cache_scale_negative", FP8, "quantized.scale-sign", assign("model.layers.2.self_attn.k_scale", torch.neg)),
)

FAULTS = (*DECLARED, *CHOSEN, *PARTS, *VALUES, *CACHE)
