"""The gate on quantized folders through its whole line: alone, against the sharded checkpoint, and with planted faults of its own."""

import json
from pathlib import Path

import pytest
import torch

from flows.gate import RejectedError, run_gate
from flows.requests import GateRequest
from flows.run import Outcome, PlainRunner
from tests.builders.editing import edit_tensors, set_fields
from tests.builders.quantized import ENCODINGS, quantization_config, quantize_linear, quantize_release
from tests.builders.released import GOLDEN, expected_tensors, write_release
from tests.builders.releases import SoundRelease, build_release, expect_from_headers

CASE = GOLDEN / "accelerate_llama"
SCALE = "model.layers.0.mlp.up_proj.weight_scale"


def _quantized(base: Path, encoding: str, dtype: torch.dtype) -> Path:
    # The recorded model of CASE, as a user's quantizer would store it.
    folder = write_release(base / "release", {n: t.to(dtype) for n, t in expected_tensors(CASE).items()}, assets=CASE / "hf")
    sound = SoundRelease("case", folder, expect_from_headers(folder))
    edit_tensors(folder, lambda held: quantize_linear(held, ENCODINGS[encoding]))
    said = quantization_config(ENCODINGS[encoding], sound)
    set_fields(folder / "config.json", quantization_config=said, dtype=str(dtype).removeprefix("torch."))
    return folder


def _gate(folder: Path, **options: object) -> Outcome:
    return run_gate(GateRequest.model_validate({"release": folder, "runs": folder.parent / "runs", **options}), PlainRunner())


def _statuses(outcome: Outcome) -> dict[str, str]:
    return {result.check: result.status for result in outcome.report.results}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["fp8_channel", "fp8_inverse", "int8_w8a8", "int8_packed", "int4_channel"])
def test_quantized_folder_is_accepted_against_its_sharded_checkpoint(encoding, dtype, tmp_path):
    outcome = _gate(_quantized(tmp_path, encoding, dtype), against=CASE / "ckpt")
    quantized = next(result for result in outcome.report.results if result.check == "quantized")
    assert 0 < quantized.measured["largest_relative_error"] < 0.14
    assert _statuses(outcome)["values"] == "passed"
    logits = next(result for result in outcome.report.results if result.check == "logits")
    assert (logits.status, logits.reason.split()[0]) == ("skipped", "quantized")


@pytest.mark.parametrize(("name", "encoding"), [("moe", "int4_group"), ("router_bias", "fp8_inverse")])
def test_quantized_folder_is_accepted_alone_and_its_sensitivity_proven(name, encoding, tmp_path):
    made = quantize_release(build_release(name, tmp_path / name), encoding, tmp_path / "release")
    outcome = _gate(made.folder, prove=12)
    assert outcome.verdict.green
    assert _statuses(outcome)["sensitivity"] == "passed"


def test_scales_of_another_tensor_are_rejected_against_the_checkpoint_alone(tmp_path):
    folder = _quantized(tmp_path, "fp8_channel", torch.float32)
    edit_tensors(folder, lambda held: held.update({SCALE: held[SCALE.replace("up_proj", "gate_proj")]}))
    assert _gate(folder).verdict.green
    with pytest.raises(RejectedError) as red:
        _gate(folder, against=CASE / "ckpt")
    found = {finding.code for result in red.value.outcome.report.results for finding in result.findings}
    assert found == {"quantized.error"}


@pytest.mark.parametrize(
    "said",
    [
        "nothing",
        {},
        [],
        {"quant_method": 7},
        {"quant_method": "fp8", "weight_block_size": [0, "x"]},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 999}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}, "ignore": [None]},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
    ],
    ids=json.dumps,
)
def test_a_senseless_declaration_is_judged_and_never_a_crash(said, tmp_path):
    folder = _quantized(tmp_path, "int8_packed", torch.float32)
    set_fields(folder / "config.json", quantization_config=said)
    try:
        outcome = _gate(folder)
    except RejectedError as red:
        outcome = red.outcome
    assert "errored" not in _statuses(outcome).values()
    assert any(finding.code.startswith("quantized.") for result in outcome.report.results for finding in result.findings)
