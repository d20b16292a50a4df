"""Quantized encodings: bit for bit what compressed-tensors makes of the same weight, and refusals of what none can hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.errors import EncodingError
from tasks.engine.encodings.encoding import encode_band
from tasks.engine.encodings.encodings import ENCODINGS
from validators.expectation import TensorSpec

quantization = pytest.importorskip("compressed_tensors.quantization")

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What the library calls each encoding; None for the one that is no preset of it: eight bits a channel, activations left alone.
PRESETS = {"fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "int8": None, "int8-w8a8": "W8A8", "int4": "W4A16"}


def library_scheme(encoding: str):
    """The library's scheme of an encoding, with the format the library itself would choose."""
    from compressed_tensors.compressors.format import infer_module_format

    preset = PRESETS[encoding]
    scheme = (
        quantization.preset_name_to_scheme(preset, ["Linear"])
        if preset
        else quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(num_bits=8, strategy="channel"))
    )
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    return scheme


def library_parts(weight: torch.Tensor, encoding: str) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores of a weight: its own scales, its own rounding, its own packing."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = library_scheme(encoding)
    low, high = {
        "channel": lambda: (weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)),
        "group": lambda: (weight.unflatten(1, (-1, 128)).amin(2), weight.unflatten(1, (-1, 128)).amax(2)),
        "block": lambda: tuple(
            torch.stack([torch.stack([most(part) for part in row.split(128, 1)]) for row in weight.split(128, 0)])
            for most in (torch.min, torch.max)
        ),
    }[scheme.weights.strategy]()
    scales, zeros = calculate_qparams(low, high, scheme.weights)
    parts = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    return BaseCompressor.get_value_from_registry(scheme.format).compress(parts, scheme)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def hard_weight(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A weight with rows that are zero, tiny, huge, of one sign, and with one outlier."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.02
    special = [lambda r: r * 0, lambda r: r * 1e-6, lambda r: r * 1e5, lambda r: -r.abs(), lambda r: r.index_fill(0, torch.tensor([0]), 3)]
    for row, change in zip(range(shape[0]), special, strict=False):
        weight[row] = change(weight[row])
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_values_scales_and_packing_are_those_of_compressed_tensors(encoding, dtype, data):
    tall, wide = ENCODINGS[encoding].multiples
    shape = (tall * data.draw(st.integers(1, 3 if tall > 1 else 40)), wide * data.draw(st.integers(1, 3 if wide > 1 else 70)))
    weight = hard_weight(shape, DTYPES[dtype], data.draw(st.integers(0, 1000)))
    stored, scales = encode_band("w", weight, ENCODINGS[encoding])
    theirs = library_parts(weight, encoding)
    assert same_bits(stored, theirs.get("weight_packed", theirs.get("weight")))
    assert same_bits(scales, theirs["weight_scale"])


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_parts_are_known_without_data_by_the_names_shapes_and_dtypes_of_compressed_tensors(encoding):
    from compressed_tensors.compressors import BaseCompressor

    codes = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16"}
    theirs = library_parts(hard_weight((256, 384), torch.bfloat16, 1), encoding)
    resolved = dict(ENCODINGS[encoding].resolve(TensorSpec("a.b.weight", (256, 384), "BF16")))
    assert {suffix: (spec.shape, spec.dtype) for suffix, spec in resolved.items()} == {
        name: (tuple(part.shape), codes[part.dtype]) for name, part in theirs.items()
    }
    assert {spec.fqn for spec in resolved.values()} == {f"a.b.{suffix}" for suffix in resolved}
    scheme = library_scheme(encoding)
    names = BaseCompressor.get_value_from_registry(scheme.format).compression_param_names(scheme)
    assert set(resolved) == set(names)
    assert scheme.format == ENCODINGS[encoding].scheme.format


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_by_the_weights_name(encoding, value):
    weight = torch.ones(128, 128)
    weight[5, 7] = value
    with pytest.raises(EncodingError, match=r"model\.up\.weight: holds values that are NaN or infinite"):
        encode_band("model.up.weight", weight, ENCODINGS[encoding])


@pytest.mark.parametrize(
    ("encoding", "shape", "dtype", "word"),
    [
        ("int4", (128, 102), "F32", "columns in multiples of 128, this has 102"),
        ("fp8-block", (64, 128), "BF16", "rows in multiples of 128, this has 64"),
        ("fp8-block", (128, 64), "BF16", "columns in multiples of 128, this has 64"),
        ("int8", (4, 4, 4), "F32", "holds matrices, this has 3 dims"),
        ("fp8", (4, 4), "F8_E4M3", "made from BF16, F16, F32, this is F8_E4M3"),
        ("int8", (0, 4), "F32", "this has 0"),
    ],
)
def test_a_weight_that_an_encoding_cannot_hold_is_told_why(encoding, shape, dtype, word):
    assert word in ENCODINGS[encoding].why_not(TensorSpec("w.weight", shape, dtype))


@pytest.mark.parametrize("encoding", ["fp8", "int8", "int8-w8a8"])
def test_channels_of_any_length_are_held(encoding):
    assert ENCODINGS[encoding].why_not(TensorSpec("w.weight", (3, 5), "BF16")) == ""
