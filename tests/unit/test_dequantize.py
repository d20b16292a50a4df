"""Dequantized values are those of compressed-tensors itself, recorded in tests/golden/compressed_tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tasks import dequantize
from tasks.dequantize import unpack
from tasks.measure import measure
from tests.builders.plans import whole, write_plan
from tests.builders.quantized import Encoding, pack, quantize_weight
from tests.builders.released import GOLDEN, write_release

RECORDED = sorted(path.stem for path in (GOLDEN / "compressed_tensors").glob("*.safetensors"))
MODULES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")


def _recorded(name: str) -> tuple[dict[str, torch.Tensor], dict]:
    with safe_open(GOLDEN / "compressed_tensors" / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["quantization_config"])  # noqa: SIM118


def _errors(tmp_path: Path, name: str, wanted: str) -> dict[str, float]:
    return _errors_of(tmp_path, *_recorded(name), wanted)


def _errors_of(tmp_path: Path, held: dict[str, torch.Tensor], config: dict, wanted: str) -> dict[str, float]:
    source = {f"{module}.weight": held[f"{wanted}.{module}.weight"] for module in MODULES}
    release = {key: value for key, value in held.items() if key.startswith("model.")}
    write_release(tmp_path / "release", release)
    (tmp_path / "release/config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    write_release(tmp_path / "source", source)
    targets = [whole(key, tuple(value.shape), "F32") for key, value in source.items()]
    plan = write_plan(tmp_path / "plan.json", "hf", tmp_path / "source", targets)
    parts = measure(tmp_path / "release", plan_path=plan, source_roots=(tmp_path / "source",), workers=1).parts
    compared = parts[~parts["relative_error"].isna()]
    return dict(zip(compared["name"], compared["relative_error"], strict=True))


@pytest.mark.parametrize("name", RECORDED)
def test_dequantized_weight_is_what_the_library_makes_of_it(name, tmp_path):
    errors = _errors(tmp_path, name, "dequantized")
    assert len(errors) == len(MODULES)
    assert max(errors.values()) < 1e-7


@pytest.mark.parametrize("name", RECORDED)
def test_error_is_that_of_the_library(name, tmp_path):
    held, _ = _recorded(name)
    for part, error in _errors(tmp_path, name, "original").items():
        weight = part.rpartition(".")[0] + ".weight"
        original, dequantized = (held[f"{kind}.{weight}"].double() for kind in ("original", "dequantized"))
        assert error == pytest.approx(float((dequantized - original).norm() / original.norm()), rel=1e-6)


@pytest.mark.parametrize("name", RECORDED)
def test_builder_stores_a_weight_as_the_library_does(name):
    held, config = _recorded(name)
    group = config["config_groups"]["group_0"]
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, group["weights"].get("group_size")), "block": (16, 32)}
    encoding = Encoding(config["format"], group["weights"], blocks[group["weights"]["strategy"]])
    for module in MODULES:
        for suffix, part in quantize_weight(held[f"original.{module}.weight"], encoding).items():
            theirs = held[f"{module}.{suffix}"]
            assert (part.dtype, part.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(part.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), suffix


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 32, 33, 100])
def test_unpacked_values_are_those_packed(bits, count):
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, count), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack(pack(values, bits), bits, count), values.to(torch.int32))


@pytest.mark.parametrize("name", RECORDED)
def test_bands_of_any_height_give_the_same_error(name, tmp_path, monkeypatch):
    whole_bands = _errors(tmp_path / "whole", name, "original")
    monkeypatch.setattr(dequantize, "_BAND_NUMEL", 7 * 64)  # ends inside the blocks of 16 rows
    assert _errors(tmp_path / "cut", name, "original") == pytest.approx(whole_bands, rel=1e-9)


def test_columns_sorted_before_they_were_grouped_have_the_scale_written_down_for_them(tmp_path):
    held, config = _recorded("int4_group_asymmetric")
    module = MODULES[0]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    values = unpack(held[f"{module}.weight_packed"], 4, 64)[:, order]
    held = held | {f"{module}.weight_packed": pack(values, 4), f"{module}.weight_g_idx": (torch.arange(64) // 16)[order].to(torch.int32)}
    held[f"dequantized.{module}.weight"] = held[f"dequantized.{module}.weight"][:, order]
    errors = _errors_of(tmp_path, held, config, "dequantized")
    assert max(errors.values()) < 1e-6
    held[f"{module}.weight_g_idx"] = held[f"{module}.weight_g_idx"].flip(0)
    assert _errors_of(tmp_path / "wrong", held, config, "dequantized")[f"{module}.weight_packed"] > 0.1


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"])
@pytest.mark.parametrize(
    "change", [lambda t: t[:1], lambda t: t.reshape(-1), lambda t: t.float(), lambda t: t[:0], lambda t: t.to(torch.int64)]
)
def test_a_part_that_is_not_as_it_should_be_is_measured_without_a_crash(part, change, tmp_path):
    held, config = _recorded("int4_group_asymmetric")
    held[f"{MODULES[0]}.{part}"] = change(held[f"{MODULES[0]}.{part}"])
    assert f"{MODULES[1]}.weight_packed" in _errors_of(tmp_path, held, config, "original")
