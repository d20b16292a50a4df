"""Every recorded checkpoint in $SHARDWRIGHT_CASES, through the whole line, held against the truth recorded while its model was live.

A case is a folder with ckpt/, hf/, ref/expected.safetensors, ref/golden.safetensors and case.json (`expect`: export or refuse, `why`).
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flows.export import run_export
from flows.gate import run_gate
from flows.requests import ExportRequest, GateRequest
from flows.run import PlainRunner, Silent
from reports.errors import ReleaseError

# What is built so far, by the beginning of a case's name.
READABLE = ("fsdp", "tp2", "accelerate", "torchtitan", "dcp_hf", "hf_", "damaged_", "ds_", "mg_")
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Words the refusal of a damaged case must have: they name its cause.
CAUSES = {
    "damaged_no_metadata": ("incomplete save", ".metadata"),
    "damaged_metadata_truncated": (".metadata",),
    "damaged_rank1_bitflip": ("model.embed_tokens.weight", "__1_0.distcp", "CRC"),
    "damaged_rank3_missing": ("__3_0.distcp",),
    "damaged_hf_shard_first_missing": ("incomplete save", "no files of shard 1"),
    "fsdp1_local_w2_llama": ("flat", "shapes"),
}


def _cases(expect: str) -> list[Path]:
    root = os.environ.get("SHARDWRIGHT_CASES")
    if not root:
        return []
    folders = sorted(p for p in Path(root).iterdir() if p.name.startswith(READABLE) and (p / "case.json").is_file())
    return [p for p in folders if json.loads((p / "case.json").read_text())["expect"] == expect]


def _parameters(expect: str) -> list[object]:
    found = [pytest.param(path, id=path.name) for path in _cases(expect)]
    return found or [pytest.param(None, marks=pytest.mark.skip(reason="cases: not run"))]


def request_for(case: Path, to: Path, dtype: str, *, golden: bool) -> ExportRequest:
    """How a user would export a case."""
    assets = case / "hf"
    recorded = case / "ref/golden.safetensors"
    return ExportRequest(
        source=case / "ckpt",
        to=to,
        assets=assets if assets.is_dir() else None,
        family="auto" if assets.is_dir() else "none",
        drop=["fixture_*=buffers that the recorded runs added"] if case.name.startswith("ds_") and assets.is_dir() else [],
        golden=recorded if golden and recorded.exists() else None,
        dtype=dtype,
        fsync=False,
        runs=to.parent / "runs",
    )


def released(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a release, by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        assert not tensors.keys() & held.keys()
        tensors |= held
    return tensors


def hold_against_truth(case: Path, folder: Path, dtype: str) -> None:
    """Names equal, and every value bit-equal to the recorded one after torch's own cast."""
    expected = load_file(case / "ref/expected.safetensors")
    has_config = (case / "hf").is_dir()
    config = json.loads((case / "hf/config.json").read_text()) if has_config else {}
    if config.get("tie_word_embeddings"):
        expected.pop("lm_head.weight", None)
    expected = {name: value for name, value in expected.items() if not (has_config and name.startswith("fixture_"))}
    got = released(folder)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        want = value.to(TORCH[dtype]) if value.is_floating_point() else value
        assert got[name].dtype == want.dtype, name
        assert torch.equal(got[name].contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), name


@pytest.mark.cases
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", _parameters("export"))
def test_a_recorded_checkpoint_is_released_bit_for_bit(case: Path, dtype: str, tmp_path: Path) -> None:
    request = request_for(case, tmp_path / "out", dtype, golden=True)
    outcome = run_export(request, PlainRunner(), Silent())
    assert outcome.verdict.green
    assert outcome.report.mapping_line().startswith("mapping proven by: " if (case / "hf").is_dir() else "mapping not proven")
    assert not [f for result in outcome.report.results for f in result.findings if f.severity == "error"]
    hold_against_truth(case, tmp_path / "out", dtype)
    for against in (None, case / "ckpt"):  # the export's own logits have been compared
        asked = GateRequest(release=tmp_path / "out", against=against, drop=request.drop, skip=["logits=compared"], runs=tmp_path / "runs")
        assert run_gate(asked, PlainRunner()).verdict.green


@pytest.mark.cases
@pytest.mark.parametrize("case", _parameters("refuse"))
def test_a_damaged_checkpoint_is_refused_by_its_cause(case: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as refusal:
        run_export(request_for(case, tmp_path / "out", "fp32", golden=False), PlainRunner(), Silent())
    for word in CAUSES.get(case.name, ()):
        assert word in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
