"""What quantized weights are stored as says when they are zero or constant; the rows are worked out by hand."""

from pathlib import Path

import pandas as pd
import pytest

from validators.expectation import Evidence
from validators.finite import examine
from validators.release import Release, StoredTensor, WeightFile

PACKED = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def _codes(form: str, weights: dict, suffix: str, dtype: str, shape: tuple[int, int], values: list[float]) -> list[str]:
    # Layers of one role: each value fills one of them, None leaves it varied.
    names = [f"model.layers.{at}.mlp.up_proj.{suffix}" for at in range(len(values))]
    group = {"targets": ["Linear"], "weights": weights}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    stored = tuple(StoredTensor(name, "a", dtype, shape, 0, 0) for name in names)
    release = Release(Path("folder"), (WeightFile("a", 0, 0, stored, {}),), config={"quantization_config": said}, others=())
    rows = [
        {
            "name": name,
            "file": "a",
            "dtype": dtype,
            "shape": "x".join(map(str, shape)),
            "absmax": 9e9 if value is None else abs(value),
            "rms": 1.0,
            "mean": 0.5 if value is None else value,
            "nonfinite": 0,
            "zero_share": float(value == 0),
            "constant": int(value is not None),
            "parity": "0",
            "sample": "",
        }
        for name, value in zip(names, values, strict=True)
    ]
    return [finding.code for finding in examine(Evidence(release, tensors=pd.DataFrame(rows))).findings]


@pytest.mark.parametrize(
    ("bits", "zero"),
    [(8, -2139062144.0), (4, -2004318072.0)],  # 0x80808080 and 0x88888888 as int32
)
def test_packed_zeros_are_zeros_and_a_word_of_zero_bits_is_none(bits, zero):
    packed = {**PACKED, "num_bits": bits}
    assert _codes("pack-quantized", packed, "weight_packed", "I32", (8, 4), [zero, None]) == ["finite.all-zero"]
    assert _codes("pack-quantized", packed, "weight_packed", "I32", (8, 4), [0.0, None]) == ["finite.constant-outlier"]


def test_packed_zeros_with_a_zero_point_are_only_constant():
    packed = {**PACKED, "symmetric": False}
    assert _codes("pack-quantized", packed, "weight_packed", "I32", (8, 4), [-2139062144.0, None]) == ["finite.constant-outlier"]


def test_zeros_that_are_not_packed_are_zeros():
    assert _codes("float-quantized", FP8, "weight", "F8_E4M3", (8, 4), [0.0, None]) == ["finite.all-zero"]


def test_weights_of_one_column_per_scale_are_all_the_largest_value():
    assert _codes("float-quantized", FP8, "weight", "F8_E4M3", (8, 1), [448.0, None]) == []
    assert _codes("float-quantized", FP8, "weight", "F8_E4M3", (8, 4), [448.0, None]) == ["finite.constant-outlier"]
