"""The sensitivity proof: faults planted into the evidence are caught, and one that no check sees turns the verdict."""

import shutil
from dataclasses import replace

import pytest

import tasks.prove as proving
from flows.gate import RejectedError, run_gate
from flows.requests import GateRequest
from flows.run import PlainRunner
from tests.builders.releases import MODELS, build_release
from validators.check import Outcome


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    base = tmp_path_factory.mktemp("sound")
    return {name: build_release(name, base / name).folder for name in MODELS}


def _gate(folder, runs, **options):
    return run_gate(GateRequest(release=folder, runs=runs, **options), PlainRunner())


def _proof(outcome):
    return next(result for result in outcome.report.results if result.check == "sensitivity")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_planted_fault_is_caught_and_the_release_is_left_alone(sound, name, tmp_path):
    before = {path: path.read_bytes() for path in sound[name].iterdir()}
    outcome = _gate(sound[name], tmp_path, prove=30)
    proof = _proof(outcome)
    assert (proof.status, proof.examined, len(proof.findings)) == ("passed", 30, 0)
    kinds = {planted.split(":")[0] for planted in proof.measured}
    assert kinds >= {"a NaN", "a lost tensor", "all zeros", "a transposed shape", "a wrapper's prefix", "a file cut short"}
    assert {path: path.read_bytes() for path in sound[name].iterdir()} == before
    assert list((outcome.paths.html.parent / "planted").iterdir()) == []


def test_with_a_source_a_flipped_bit_and_exchanged_rows_are_caught(sound, tmp_path):
    source = shutil.copytree(sound["dense"], tmp_path / "source")
    outcome = _gate(sound["dense"], tmp_path / "runs", against=source, prove=20, skip=["logits=not here"])
    assert {"a flipped bit", "two rows exchanged"} <= {planted.split(":")[0] for planted in _proof(outcome).measured}


def test_the_same_release_is_proven_by_the_same_faults(sound, tmp_path):
    first, second = (_proof(_gate(sound["moe"], tmp_path / str(n), prove=12)) for n in range(2))
    assert dict(first.measured) == dict(second.measured)


def test_a_check_that_sees_nothing_is_found_out(sound, tmp_path, monkeypatch):
    blind = tuple(replace(c, examine=lambda _: Outcome(examined=1)) if c.name == "finite" else c for c in proving.CHECKS_OF_EXPORT)
    monkeypatch.setattr(proving, "CHECKS_OF_EXPORT", blind)
    with pytest.raises(RejectedError, match=r"sensitivity \(sensitivity\.missed\)") as red:
        _gate(sound["dense"], tmp_path, prove=12)
    assert {f.expected for f in _proof(red.value.outcome).findings} >= {"a NaN is caught"}


def test_a_check_that_was_skipped_catches_nothing(sound, tmp_path):
    with pytest.raises(RejectedError, match="sensitivity"):
        _gate(sound["dense"], tmp_path, prove=12, skip=["finite=not wanted"])
