"""The gate through its whole line: honest releases are accepted, planted faults rejected by their codes, alone and against a source."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.export import run_export
from flows.gate import RejectedError, run_gate
from flows.requests import ExportRequest, GateRequest
from flows.run import Outcome, PlainRunner, Silent
from reports.errors import ReleaseError
from tests.builders.released import GOLDEN
from tests.builders.releases import build_release

CASE = GOLDEN / "accelerate_llama"


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def honest(request, tmp_path_factory):
    """A release that the export made."""
    base = tmp_path_factory.mktemp("honest")
    run_export(
        ExportRequest(
            source=CASE / "ckpt",
            to=base / "release",
            assets=CASE / "hf",
            dtype=request.param,
            fsync=False,
            skip=["logits=not here"],
            runs=base / "runs",
        ),
        PlainRunner(),
        Silent(),
    )
    return base / "release"


@pytest.fixture
def release(honest, tmp_path):
    """A copy of the release, to plant faults in."""
    return Path(shutil.copytree(honest, tmp_path / "release"))


def _gate(folder: Path, **options: object) -> Outcome:
    return run_gate(GateRequest.model_validate({"release": folder, "runs": folder.parent / "runs", **options}), PlainRunner())


def _codes(outcome: Outcome) -> set[str]:
    return {f.code for result in outcome.report.results for f in result.findings if f.severity == "error"}


def _edit(folder: Path, name: str, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def _forget_manifest(folder: Path) -> None:
    for name in ("shardwright.json", "shardwright.committed"):
        (folder / name).unlink()


def test_an_honest_release_is_accepted_alone_and_left_as_it_was(release):
    before = {path.name: path.read_bytes() for path in release.iterdir()}
    outcome = _gate(release)
    assert outcome.verdict.line.startswith("accepted")
    assert not [f for result in outcome.report.results for f in result.findings]
    assert outcome.report.mapping_line() == "mapping not proven"
    assert {path.name: path.read_bytes() for path in release.iterdir()} == before


def test_a_folder_that_another_tool_made_is_accepted(release):
    _forget_manifest(release)
    assert _gate(release).verdict.green


@pytest.mark.slow
def test_an_honest_release_is_accepted_against_its_source_and_recorded_logits(release):
    outcome = _gate(release, against=CASE / "ckpt", golden=CASE / "ref/golden.safetensors")
    assert outcome.verdict.green
    assert outcome.report.mapping_line() == "mapping proven by: recorded, framework"
    skipped = {result.check for result in outcome.report.results if result.status == "skipped"}
    assert skipped <= {"tokenizer", "config_drift", "tokenizer_drift", "weights_drift", "quantized"}
    assert {result.status for result in outcome.report.results if result.check not in skipped} == {"passed"}
    assert not (outcome.paths.html.parent / "merged").exists()


@pytest.mark.slow
def test_two_swapped_layers_are_caught_against_the_source_and_by_recorded_logits_alone(release):
    _forget_manifest(release)
    path = release / "model.safetensors"
    tensors = load_file(path)
    first, second = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert _gate(release).verdict.green  # nothing but a reference can tell
    with pytest.raises(RejectedError) as red:
        _gate(release, against=CASE / "ckpt", skip=["logits=values must tell alone"])
    assert "values.exchanged" in _codes(red.value.outcome)
    if next(iter(tensors.values())).dtype != torch.float32:
        return  # in bf16 the limits leave room for what these layers of a toy differ by
    with pytest.raises(RejectedError) as red:
        _gate(release, golden=CASE / "ref/golden.safetensors")
    assert any(code.startswith("logits.") for code in _codes(red.value.outcome))


def test_bytes_that_differ_from_the_manifest_are_caught_without_a_reference(release):
    _edit(release, "model.norm.weight", lambda values: values * 1.5)
    with pytest.raises(RejectedError) as red:
        _gate(release)
    assert "manifest.digest" in _codes(red.value.outcome)


def test_nan_stays_visible_in_the_report(release):
    _forget_manifest(release)
    _edit(release, "model.norm.weight", lambda values: torch.full_like(values, torch.nan))
    with pytest.raises(RejectedError) as red:
        _gate(release)
    assert "finite.nonfinite" in _codes(red.value.outcome)
    stored = json.loads(red.value.outcome.paths.json.read_text())
    (row,) = [row for row in stored["tensors"] if row["name"] == "model.norm.weight"]
    assert (row["absmax"], row["nonfinite"]) == ("NaN", 64)


def test_a_release_cut_short_is_rejected_by_name(release):
    path = release / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RejectedError) as red:
        _gate(release)
    assert "files.truncated" in _codes(red.value.outcome)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": 1}       '])
def test_a_hostile_weight_file_is_rejected(release, content):
    (release / "model.safetensors").write_bytes(content)
    with pytest.raises(RejectedError) as red:
        _gate(release)
    assert _codes(red.value.outcome) & {"files.malformed", "files.zero-length"}


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"model_type": "llama"}', '{"model_type": 7}', '{"model_type": "llama", "hidden_size": -1}']
)
def test_a_config_that_describes_no_model_is_rejected_or_named(release, text):
    (release / "config.json").write_text(text)
    with pytest.raises((RejectedError, ReleaseError)) as said:
        _gate(release)
    assert "config" in str(said.value) or "file" in str(said.value)


def test_results_go_where_a_ci_service_looks(release, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    _gate(release, junit=tmp_path / "deep" / "junit.xml")
    assert "accepted" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "deep/junit.xml").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"release": "absent"}, "does not exist"),
        ({"golden": "absent.safetensors"}, "--golden"),
        ({"against": "absent"}, "does not exist"),
        ({"skip": ["nothing=because"]}, "no check 'nothing'"),
        ({"runs": "release/runs"}, "inside the release"),
        ({"family": "strange"}, "no family 'strange'"),
    ],
)
def test_a_request_that_cannot_be_judged_is_refused_with_the_reason(release, options, words):
    here = {key: release.parent / value if key not in ("skip", "family") else value for key, value in options.items()}
    with pytest.raises(ReleaseError, match=words):
        _gate(**{"folder": release} | ({"folder": here.pop("release")} if "release" in here else {}) | here)


@pytest.mark.slow
def test_the_command_says_accepted_with_0_and_names_the_code_with_1(command_line, honest, tmp_path):
    folder = Path(shutil.copytree(honest, tmp_path / "release"))
    green = command_line.run("gate", folder, "--runs", tmp_path / "runs", "--json")
    assert (green.returncode, json.loads(green.stdout)["green"]) == (0, True)
    _forget_manifest(folder)
    (folder / "model.safetensors").unlink()
    red = command_line.run("gate", folder, "--runs", tmp_path / "runs")
    assert red.returncode == 1
    assert "files.none" in red.stdout
    assert red.stdout.splitlines()[-1].startswith("report ")


def test_a_waiver_lets_one_finding_pass_until_its_last_day_and_is_shown(release, tmp_path):
    _forget_manifest(release)
    _edit(release, "model.norm.weight", lambda values: torch.full_like(values, torch.nan))
    policy = tmp_path / "policy.yaml"
    row = "waivers:\n  - code: finite.nonfinite\n    where: model.norm.weight\n    owner: Ada\n    reason: known\n    expires: {day}\n"
    policy.write_text(row.format(day="2999-01-01"))
    with pytest.raises(RejectedError) as red:
        _gate(release, policy=policy)
    waived = _codes(red.value.outcome)
    assert "finite.nonfinite" not in waived
    policy.write_text(row.format(day="2020-01-01"))
    with pytest.raises(RejectedError) as red:
        _gate(release, policy=policy)
    assert {"finite.nonfinite", "policy.waiver-expired"} <= _codes(red.value.outcome)


def test_a_policy_that_is_wrong_is_refused_with_its_line(release, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("required_checks:\n  - files\n  - colour\n")
    with pytest.raises(ReleaseError, match=r"policy\.yaml:3"):
        _gate(release, policy=policy)


@pytest.mark.slow
def test_the_default_policy_is_written_once_and_changes_nothing(command_line, honest, tmp_path):
    first = command_line.run("policy", "init", "policy.yaml", cwd=tmp_path)
    assert (first.returncode, first.stdout) == (0, "wrote policy.yaml\n")
    again = command_line.run("policy", "init", "policy.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert _gate(Path(shutil.copytree(honest, tmp_path / "release")), policy=tmp_path / "policy.yaml").verdict.green


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dense", "tied", "moe", "router_bias"])
def test_what_save_pretrained_writes_is_accepted_without_a_word(name, dtype, tmp_path):
    sound = build_release(name, tmp_path / "release", dtype=dtype)
    if name == "router_bias" and dtype != torch.float32:
        keep_router_bias(tmp_path / "release", build_release(name, tmp_path / "fp32").folder)
    outcome = _gate(sound.folder)
    assert [f for result in outcome.report.results for f in result.findings] == []
    assert {r.check: r.reason for r in outcome.report.results if r.status == "skipped"} == {
        "manifest": "not made by `shardwright export`",
        "config_drift": "no reference",
        "tokenizer_drift": "no reference",
        "weights_drift": "no earlier release",
        "values": "nothing to compare with (--against)",
        "logits": "nothing to compare with (--golden, --against)",
    }


def keep_router_bias(folder: Path, precise: Path) -> None:
    """Put the fp32 router biases back, as an honest cast leaves them."""
    tensors, kept = load_file(folder / "model.safetensors"), load_file(precise / "model.safetensors")
    tensors |= {name: value for name, value in kept.items() if name.endswith("e_score_correction_bias")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size"])
def test_a_config_of_absurd_size_is_named_and_ends(release, key):
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps({**config, key: 10**9}))
    with pytest.raises((RejectedError, ReleaseError)) as said:
        _gate(release)
    assert key in str(said.value) or "config" in str(said.value)
