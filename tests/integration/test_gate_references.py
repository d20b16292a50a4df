"""The gate beside a reference: the trainer's assets, an earlier release; and what it saves by stopping early or by an earlier report."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.gate import RejectedError, run_gate
from flows.requests import GateRequest
from flows.run import Outcome, PlainRunner
from reports.errors import ReleaseError
from tests.builders.editing import edit_tensors, set_fields
from tests.builders.releases import build_release

STEP = "shardwright.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A sound folder of several weight files."""
    return build_release("dense", tmp_path_factory.mktemp("sound") / "model").folder


@pytest.fixture
def release(sound, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(sound, tmp_path / "release"))


def gate(folder: Path, **options: object) -> Outcome:
    return run_gate(GateRequest.model_validate({"release": folder, "runs": folder.parent / "runs", **options}), PlainRunner())


def rejected(folder: Path, **options: object) -> Outcome:
    with pytest.raises(RejectedError) as red:
        gate(folder, **options)
    return red.value.outcome


def codes(outcome: Outcome) -> set[str]:
    return {f.code for result in outcome.report.results for f in result.findings}


def result_of(outcome: Outcome, check: str):
    return next(result for result in outcome.report.results if result.check == check)


def train(tensors: dict) -> None:
    """Move every matrix a little."""
    generator = torch.Generator().manual_seed(5)
    tensors.update({n: t + 0.02 * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items() if t.ndim > 1})


def test_assets_of_the_trainer_show_a_config_that_drifted(release, sound):
    assert gate(release, assets=sound).verdict.green
    set_fields(release / "config.json", rms_norm_eps=1e-5)
    assert gate(release).verdict.green  # sound by itself
    assert "config_drift.eps" in codes(rejected(release, assets=sound))


def test_config_beside_the_source_is_the_reference_without_being_named(release, sound):
    set_fields(release / "config.json", max_position_embeddings=256)
    outcome = rejected(release, against=sound, skip=["logits=config alone must tell"])
    assert "config_drift.positions" in codes(outcome)
    assert result_of(outcome, "values").status == "passed"


def test_older_spellings_of_a_config_are_no_drift(release, sound, tmp_path):
    assets = Path(shutil.copytree(sound, tmp_path / "assets"))
    rope = json.loads((assets / "config.json").read_text())["rope_parameters"]
    set_fields(
        assets / "config.json", rope_parameters=None, rope_theta=rope["rope_theta"], torch_dtype="bfloat16", dtype=None, mlp_bias=None
    )
    set_fields(release / "config.json", rope_theta=rope["rope_theta"])
    outcome = gate(release, assets=assets)
    assert codes(outcome) == set()
    assert result_of(outcome, "config_drift").examined > 40


def test_retrained_weights_are_judged_by_statistics_not_by_values(release, sound):
    edit_tensors(release, train)
    assert "values.differing" in codes(rejected(release, against=sound, skip=["logits=values must tell"]))
    outcome = gate(release, against=sound, weights="retrained")
    assert codes(outcome) == set()
    assert outcome.report.source.endswith("(an earlier release, other weights)")
    edit_tensors(release, lambda held: held.update({n: t * 0.01 for n, t in held.items() if n.endswith("layers.2.mlp.up_proj.weight")}))
    assert "weights_drift.rms" in codes(rejected(release, against=sound, weights="retrained"))


@pytest.mark.parametrize(("steps", "is_earlier"), [((8, 4), True), ((8, 8), False), ((8, None), False)])
def test_manifests_of_two_steps_say_that_the_weights_are_others(release, sound, tmp_path, steps, is_earlier):
    other = Path(shutil.copytree(sound, tmp_path / "other"))
    edit_tensors(release, train)
    for folder, step in zip((release, other), steps, strict=True):
        (folder / STEP).write_text(json.dumps({"source": {"step": step}}))
    options = {"against": other, "skip": ["logits=not here", "manifest=not here"]}
    outcome = gate(release, **options) if is_earlier else rejected(release, **options)
    assert ("values.differing" in codes(outcome)) != is_earlier


@pytest.mark.parametrize("against", [None, "assets"])
def test_retrained_needs_an_earlier_release(release, tmp_path, against):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    with pytest.raises(ReleaseError, match="needs --against with an earlier release"):
        gate(release, weights="retrained", against=against and tmp_path / against)


def test_stop_early_reads_no_tensor_once_the_config_is_wrong(release):
    assert gate(release, stop_early=True).verdict.green
    set_fields(release / "config.json", num_hidden_layers=5)
    whole, early = rejected(release), rejected(release, stop_early=True)
    assert {"inventory.missing", "config.layers"} <= codes(early) <= codes(whole)
    assert result_of(early, "finite").reason == "stopped early"
    assert [phase.name for phase in early.report.phases] == ["describe", "check headers"]
    assert [r.check for r in early.report.results] == [r.check for r in whole.report.results]


def test_unchanged_files_are_not_measured_again(release, monkeypatch):
    first = gate(release)
    files = sorted(path.name for path in release.glob("*.safetensors"))
    assert len(files) > 2
    changed = release / files[1]
    tensors = load_file(changed)
    name = next(name for name in tensors if name.endswith("proj.weight"))
    tensors[name] = tensors[name] * torch.nan
    save_file(tensors, changed, metadata={"format": "pt"})
    for path in release.glob("*.safetensors"):
        if path != changed:
            monkeypatch.setitem(_UNCHANGED, path.name, True)
    monkeypatch.setattr("tasks.measure.read_box", _refuse_unchanged)
    again = rejected(release, changed_since=first.paths.json)
    assert codes(again) == {"finite.nonfinite", "statistics.rule-broken"}
    assert f"{len(files) - 1} of {len(files)} weight files are unchanged" in again.report.notes[0]
    assert [(row.name, row.absmax) for row in again.report.tensors if row.file != changed.name] == [
        (row.name, row.absmax) for row in first.report.tensors if row.file != changed.name
    ]
    assert [row.name for row in again.report.tensors] == [row.name for row in first.report.tensors]


_UNCHANGED: dict[str, bool] = {}


def _refuse_unchanged(descriptor, path, *args):
    from tasks.witnesses.boxes import read_box

    assert path.name not in _UNCHANGED, f"{path.name} was read again"
    return read_box(descriptor, path, *args)


def test_values_of_unchanged_files_are_taken_over_only_for_the_same_source(release, sound):
    options = {"against": sound, "skip": ["logits=not here"]}
    first = gate(release, **options)
    again = gate(release, changed_since=first.paths.json.parent, **options)
    assert "weight files are unchanged" in again.report.notes[0]
    assert result_of(again, "values").examined == result_of(first, "values").examined > 0
    alone = gate(release, changed_since=first.paths.json)
    assert "held against another source" in alone.report.notes[0]


@pytest.mark.parametrize("page", ["absent.json", "config.json"])
def test_changed_since_wants_a_report(release, page):
    with pytest.raises(ReleaseError, match="is no report"):
        gate(release, changed_since=release / page)


def test_changed_since_wants_the_tables_beside_the_report(release):
    first = gate(release)
    (first.paths.json.parent / "tensors.csv").unlink()
    with pytest.raises(ReleaseError, match=r"tensors\.csv is not beside the report"):
        gate(release, changed_since=first.paths.json)


def test_report_is_copied_where_it_is_wanted(release, tmp_path):
    gate(release, report=tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["report.html", "report.json", "report.md", "report.xml"]
