"""One run of Megatron-LM, saved in both of its formats and kept in tests/golden: equal tensors and moments, releases equal byte by byte."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flows.export import run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from tests.integration.megatron_pairs import hold_masters, hold_pair

GOLDEN = Path(__file__).parents[1] / "golden"
LEGACY, DIST = GOLDEN / "megatron_llama_bf16_legacy", GOLDEN / "megatron_llama_bf16_torch_dist"


def test_both_formats_hold_the_same_tensors_and_moments():
    hold_pair(LEGACY / "ckpt", DIST / "ckpt")


@pytest.mark.parametrize("case", [LEGACY, DIST], ids=["legacy", "torch_dist"])
def test_masters_round_to_the_weights(case):
    hold_masters(case / "ckpt")


def test_both_are_released_as_the_live_model_bit_for_bit(tmp_path):
    made = []
    for case in (LEGACY, DIST):
        out = tmp_path / case.name
        request = ExportRequest(
            source=case / "ckpt",
            to=out,
            assets=case / "hf",
            golden=case / "ref" / "golden.safetensors",
            fsync=False,
            runs=tmp_path / "runs",
        )
        outcome = run_export(request, PlainRunner(), Silent())
        assert outcome.verdict.green
        assert "recorded" in outcome.report.mapping_line()
        made.append((out / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    expected, released = load_file(LEGACY / "ref" / "expected.safetensors"), load_file(tmp_path / LEGACY.name / "model.safetensors")
    assert released.keys() == expected.keys()
    assert all(released[name].dtype == torch.bfloat16 and torch.equal(released[name], value) for name, value in expected.items())
