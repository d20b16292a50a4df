"""Measuring a release: statistics against torch on the whole tensor, and the exact comparison on planted differences."""

import math
import zlib
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tasks import measure as measuring
from tasks.measure import Measurement, measure
from tests.builders.plans import Made, whole, write_plan
from tests.builders.released import CODES, GOLDEN, expected_tensors, write_release

Tensors = dict[str, torch.Tensor]
SIX_DIGITS = 1e-6


@pytest.fixture(params=[16, 1 << 19], ids=["many pieces", "one piece"])
def piece_numel(request, monkeypatch):
    monkeypatch.setattr(measuring, "_PIECE_NUMEL", request.param)


def _row(table: pd.DataFrame, name: str) -> dict:
    return table.set_index("name").loc[name].to_dict()


def _compare(tmp_path: Path, released: Tensors, source: Tensors, targets: list[Made] | None = None) -> Measurement:
    root = tmp_path / "source"
    root.mkdir()
    save_file(source, root / "model.safetensors", metadata={"format": "pt"})
    targets = targets or [
        whole(name, tuple(value.shape), CODES[released[name].dtype]) for name, value in source.items() if name in released
    ]
    plan = write_plan(tmp_path / "plan.json", "hf", root, targets)
    return measure(write_release(tmp_path / "release", released), plan_path=plan, source_roots=(root,), workers=2)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("piece_numel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_statistics_equal_torch_over_the_whole_tensor(tmp_path, dtype):
    values = _normal(9, 7).to(dtype)
    values[2, 3] = 0.0
    values[5, 1] = -0.0
    row = _row(measure(write_release(tmp_path, {"w": values}), plan_path=None, source_roots=(), workers=1).tensors, "w")
    wide = values.to(torch.float64)
    assert row["absmax"] == wide.abs().max().item()
    digits = SIX_DIGITS if dtype in (torch.float32, torch.bfloat16, torch.float16) else 1e-14
    assert row["rms"] == pytest.approx(wide.square().mean().sqrt().item(), rel=digits)
    assert row["mean"] == pytest.approx(wide.mean().item(), abs=digits * row["rms"])
    assert row["zero_share"] == (wide == 0).to(torch.float64).mean().item()
    assert (row["nonfinite"], row["constant"]) == (0, 0)
    assert math.isnan(row["relative_error"])


@pytest.mark.usefixtures("piece_numel")
def test_non_finite_values_are_counted_and_leave_the_rest_measured(tmp_path):
    values = _normal(10, 10).to(torch.bfloat16)
    values[0, 0], values[4, 4], values[9, 9] = math.nan, math.inf, -math.inf
    row = _row(measure(write_release(tmp_path, {"w": values}), plan_path=None, source_roots=(), workers=1).tensors, "w")
    finite = values[values.isfinite()].to(torch.float64)
    assert row["nonfinite"] == 3
    assert row["absmax"] == finite.abs().max().item()
    assert row["rms"] == pytest.approx(finite.square().mean().sqrt().item(), rel=SIX_DIGITS)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-13, 1e-12, 0.0123, 1e15, 1e16, 1e25, 3e38])
@pytest.mark.parametrize("kind", ["constant", "normal"])
def test_sums_keep_six_digits_whatever_the_size_of_the_values(tmp_path, scale, kind):
    values = torch.full((300_007,), 1.0) if kind == "constant" else _normal(300_007)
    values = (values.to(torch.float64) * scale).clamp(-3.3e38, 3.3e38).to(torch.bfloat16)
    row = _row(measure(write_release(tmp_path, {"w": values}), plan_path=None, source_roots=(), workers=1).tensors, "w")
    wide = values.to(torch.float64)
    assert row["rms"] == pytest.approx(wide.square().mean().sqrt().item(), rel=SIX_DIGITS)
    assert row["mean"] == pytest.approx(wide.mean().item(), abs=SIX_DIGITS * row["rms"])


def test_a_tensor_without_a_finite_value_has_no_statistics(tmp_path):
    row = _row(measure(write_release(tmp_path, {"w": torch.full((4,), math.nan)}), plan_path=None, source_roots=(), workers=1).tensors, "w")
    assert (row["nonfinite"], row["constant"]) == (4, 0)
    assert math.isnan(row["absmax"])


@pytest.mark.parametrize(
    ("values", "constant"),
    [(torch.ones(40), 1), (torch.zeros(3, 3), 1), (torch.ones(1), 0), (torch.tensor(2.0), 0), (torch.tensor([1.0, 1.0, 2.0]), 0)],
)
def test_constant_means_more_than_one_value_and_all_equal(tmp_path, values, constant):
    row = _row(measure(write_release(tmp_path, {"w": values}), plan_path=None, source_roots=(), workers=1).tensors, "w")
    assert row["constant"] == constant


def test_integers_booleans_and_empty_tensors_are_measured(tmp_path):
    tensors = {"ids": torch.tensor([0, -3, 7]), "mask": torch.tensor([True, False]), "none": torch.empty(0, 4)}
    table = measure(write_release(tmp_path, tensors), plan_path=None, source_roots=(), workers=1).tensors
    assert _row(table, "ids")["absmax"] == 7.0
    assert _row(table, "ids")["zero_share"] == pytest.approx(1 / 3)
    assert _row(table, "mask")["zero_share"] == 0.5
    assert _row(table, "none")["shape"] == "0x4"


@pytest.mark.usefixtures("piece_numel")
def test_equal_bits_differ_nowhere_nan_included(tmp_path):
    values = _normal(8, 8)
    values[1, 1] = math.nan
    found = _compare(tmp_path, {"w": values}, {"w": values})
    row = _row(found.values, "w")
    assert (row["numel"], row["differing"], row["first"], row["max_abs"]) == (64, 0, -1, 0.0)
    assert (row["expected_crc32"], row["found_crc32"]) == (-1, -1)
    assert found.witness.heard
    assert _row(found.tensors, "w")["relative_error"] == 0.0


@pytest.mark.usefixtures("piece_numel")
def test_one_changed_bit_is_counted_placed_and_both_sums_given(tmp_path):
    source = _normal(8, 8)
    released = source.clone()
    released.view(torch.int32)[5, 2] ^= 1
    found = _compare(tmp_path, {"w": released}, {"w": source})
    row = _row(found.values, "w")
    assert (row["differing"], row["first"]) == (1, 42)
    assert row["max_abs"] == pytest.approx((released.double() - source.double()).abs().max().item())
    assert row["expected_crc32"] == zlib.crc32(source.numpy().tobytes())
    assert row["found_crc32"] == zlib.crc32(released.numpy().tobytes())
    gap = (released.double() - source.double()).square().sum() / source.double().square().sum()
    assert _row(found.tensors, "w")["relative_error"] == pytest.approx(gap.sqrt().item())


def test_zero_against_minus_zero_differs(tmp_path):
    found = _compare(tmp_path, {"w": torch.tensor([1.0, -0.0])}, {"w": torch.tensor([1.0, 0.0])})
    assert _row(found.values, "w")["differing"] == 1
    assert _row(found.values, "w")["max_abs"] == 0.0


def test_a_nan_against_a_number_stays_visible(tmp_path):
    found = _compare(tmp_path, {"w": torch.tensor([1.0, math.nan, 5.0])}, {"w": torch.tensor([1.0, 2.0, 3.0])})
    assert _row(found.values, "w")["differing"] == 2
    assert math.isnan(_row(found.values, "w")["max_abs"])


@pytest.mark.usefixtures("piece_numel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_honest_cast_differs_nowhere_and_its_error_is_that_of_the_cast(tmp_path, dtype):
    source = _normal(16, 5)
    found = _compare(tmp_path, {"w": source.to(dtype)}, {"w": source})
    assert _row(found.values, "w")["differing"] == 0
    gap = (source.to(dtype).double() - source.double()).square().sum() / source.double().square().sum()
    assert _row(found.tensors, "w")["relative_error"] == pytest.approx(gap.sqrt().item())


def test_values_flushed_to_zero_by_the_cast_are_counted(tmp_path):
    source = torch.tensor([1.0, 1e-9, 0.0, -1e-12, 1e-5])
    row = _row(_compare(tmp_path, {"w": source.to(torch.float16)}, {"w": source}).values, "w")
    assert (row["differing"], row["flushed"]) == (0, 2)


def test_exchanged_tensors_are_told_by_their_sums(tmp_path):
    up, down = _normal(6, 6, seed=1), _normal(6, 6, seed=2)
    values = _compare(tmp_path, {"up": down, "down": up}, {"up": up, "down": down}).values
    assert _row(values, "up")["found_crc32"] == _row(values, "down")["expected_crc32"]
    assert _row(values, "down")["found_crc32"] == _row(values, "up")["expected_crc32"]


def test_another_shape_or_dtype_than_planned_differs_everywhere(tmp_path):
    source = {"turned": _normal(4, 6), "cast": _normal(4, 6, seed=3)}
    released = {"turned": source["turned"].t().contiguous(), "cast": source["cast"].to(torch.bfloat16)}
    targets = [whole(name, (4, 6), "F32") for name in source]
    values = _compare(tmp_path, released, source, targets).values
    for name in source:
        assert _row(values, name)["differing"] == 24
        assert math.isnan(_row(values, name)["max_abs"])
    assert _row(values, "turned")["expected_crc32"] == zlib.crc32(source["turned"].numpy().tobytes())


def test_a_tensor_the_plan_does_not_know_is_measured_but_not_compared(tmp_path):
    found = _compare(tmp_path, {"w": torch.ones(3), "stray": torch.ones(2)}, {"w": torch.ones(3)})
    assert list(found.tensors["name"]) == ["stray", "w"]
    assert list(found.values["name"]) == ["w"]


def test_a_file_cut_short_is_measured_as_unreadable_and_differs_everywhere(tmp_path):
    source = {"a": _normal(8, 8), "b": _normal(8, 8, seed=4)}
    intact = _compare(tmp_path, source, source)
    assert intact.values["differing"].sum() == 0
    weights = tmp_path / "release" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-16])
    found = measure(tmp_path / "release", plan_path=tmp_path / "plan.json", source_roots=(tmp_path / "source",), workers=2)
    assert _row(found.values, "a")["differing"] == 0
    assert _row(found.values, "b")["differing"] == 64
    assert math.isnan(_row(found.tensors, "b")["rms"])


def test_any_number_of_workers_gives_the_same_tables(tmp_path):
    tensors = {f"layers.{i}.w": _normal(i + 1, 9, seed=i) for i in range(20)}
    write_release(tmp_path, tensors)
    one, four = (measure(tmp_path, plan_path=None, source_roots=(), workers=n).tensors for n in (1, 4))
    pd.testing.assert_frame_equal(one, four)


def test_threads_of_torch_are_as_before(tmp_path):
    before = torch.get_num_threads()
    measure(write_release(tmp_path, {"w": torch.ones(4)}), plan_path=None, source_roots=(), workers=2)
    assert torch.get_num_threads() == before


def test_without_a_plan_the_witness_is_not_heard_and_says_why(tmp_path):
    found = measure(write_release(tmp_path, {"w": torch.ones(4)}), plan_path=None, source_roots=(), workers=1)
    assert not found.witness.heard
    assert "no plan" in found.witness.detail
    assert len(found.values) == 0


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("accelerate_llama", torch.float32), ("accelerate_llama", torch.bfloat16), ("fsdp2_w4_llama_tied_bf16", torch.bfloat16)],
)
def test_a_recorded_checkpoint_proves_its_recorded_weights_and_convicts_a_changed_one(tmp_path, case, dtype):
    expected = expected_tensors(GOLDEN / case, without_tied_head="tied" in case)
    root = GOLDEN / case / "ckpt"
    targets = [whole(name, tuple(value.shape), CODES[dtype]) for name, value in expected.items()]
    plan = write_plan(tmp_path / "plan.json", "dcp", root, targets)
    released = {name: value.to(dtype) for name, value in expected.items()}
    sound = measure(write_release(tmp_path / "sound", released), plan_path=plan, source_roots=(root,), workers=2)
    assert len(sound.values) == len(expected)
    assert sound.values["differing"].sum() == 0
    name = "model.layers.1.self_attn.k_proj.weight"
    released[name] = released[name].flip(0)
    faulty = measure(write_release(tmp_path / "faulty", released), plan_path=plan, source_roots=(root,), workers=2)
    assert list(faulty.values[faulty.values["differing"] > 0]["name"]) == [name]
