"""Every planted fault of a run's checkpoints is caught by its code, by no crash, and turns the verdict when its code is an error."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from flows.drill_requests import DrillRequest
from flows.restore_drill import DrillFailedError, run_drill
from flows.run import Outcome, PlainRunner
from reports.codes import CODES
from reports.drill_codes import DRILL_CODES
from tests.builders.zero import SLOTS
from tests.faults.faults_in_checkpoints import FAULTS, RUNS, ZERO, CheckpointFault, edit, recut
from tests.faults.faults_in_resume import RESTORES, RESUMES


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The sound runs."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in RUNS.items()}


@pytest.fixture(scope="module")
def run(runs) -> Path:
    """The sound run that most faults are planted into."""
    return runs["fsdp"]


def _drill(root: Path, fault: CheckpointFault | None = None) -> Outcome:
    options: dict[str, object] = {}
    if fault and fault.goals:
        options["goals"] = root.parent / "drill.yaml"
        options["goals"].write_text(yaml.safe_dump(dict(fault.goals)))
    if fault and fault.log:
        options["log"] = root.parent / "run.log.jsonl"
    try:
        return run_drill(DrillRequest.model_validate({"root": root, "runs": root.parent / "runs", **options}), PlainRunner())
    except DrillFailedError as red:
        return red.outcome


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_fault_is_caught_by_its_code(fault, runs, tmp_path):
    root = Path(shutil.copytree(runs[fault.run], tmp_path / "run"))
    shutil.copy(runs[fault.run].parent / "run.log.jsonl", tmp_path)
    if fault.drilled_before:
        assert _drill(root).verdict.green
    fault.plant(root)
    outcome = _drill(root, fault)
    assert [f"{r.check}: {r.reason}" for r in outcome.report.results if r.status == "errored"] == []
    found = {finding.code: result for result in outcome.report.results for finding in result.findings}
    assert fault.code in found
    assert found[fault.code].check == fault.code.split(".")[0]
    if CODES[fault.code].severity == "error":
        assert not outcome.verdict.green


def test_the_sound_run_is_green_without_a_word(run, tmp_path):
    root = Path(shutil.copytree(run, tmp_path / "run"))
    for _ in range(2):
        outcome = _drill(root)
        assert (outcome.verdict.green, [f for r in outcome.report.results for f in r.findings]) == (True, [])


def test_a_save_cut_for_another_number_of_ranks_is_the_one_recorded(runs, tmp_path):
    root = Path(shutil.copytree(runs["zero"], tmp_path / "run"))
    recut(lambda slot: {name: ZERO.moment(slot, name) for name in ZERO.masters})(root)
    outcome = _drill(root)
    (state,) = (result for result in outcome.report.results if result.check == "state")
    assert (state.findings, state.measured["compared with a record"]) == ((), len(ZERO.truth) + len(ZERO.masters) * (len(SLOTS) + 1))


@pytest.mark.parametrize("code", sorted(DRILL_CODES))
def test_each_code_of_drills_has_a_planted_fault(code):
    assert code in {fault.code for fault in (*FAULTS, *RESUMES, *RESTORES)}


def test_names_of_faults_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def _without_momentum(state: dict) -> None:
    # As plain SGD saves itself: groups, and no state at all.
    state["optim"] = {"state": {}, "param_groups": [{"lr": 0.1, "momentum": 0.0, "params": list(state["model"])}]}


def _factored(state: dict) -> None:
    # As Adafactor with a first moment: matrices have theirs by rows and columns.
    for entry in state["optim"]["state"].values():
        second = entry["exp_avg_sq"]
        if second.ndim == 2:
            del entry["exp_avg_sq"]
            entry |= {"exp_avg_sq_row": second.mean(-1), "exp_avg_sq_col": second.mean(-2)}


def _in_blocks(state: dict) -> None:
    # As 8-bit Adam: codes in the parameter's shape, scales in blocks.
    for entry in state["optim"]["state"].values():
        entry["state1"] = entry.pop("exp_avg").to(torch.uint8)
        entry["state2"] = entry.pop("exp_avg_sq").to(torch.uint8)
        entry |= {"absmax1": torch.ones(3), "qmap1": torch.ones(256)}


def _per_epoch(state: dict) -> None:
    state["lr_scheduler"].update(last_epoch=0)


def _frozen(state: dict) -> None:
    for name in ("up.bias", "norm.weight"):
        del state["optim"]["state"][name]


@pytest.mark.parametrize("change", [_without_momentum, _factored, _in_blocks, _per_epoch, _frozen])
def test_honest_optimizers_and_schedules_of_other_kinds_are_green(change, run, tmp_path):
    root = Path(shutil.copytree(run, tmp_path / "run"))
    edit(change)(root)
    edit(change, 3)(root)
    assert _drill(root).verdict.line.startswith("restorable")


def test_a_parameter_unfrozen_between_drills_only_warns(run, tmp_path):
    root = Path(shutil.copytree(run, tmp_path / "run"))
    edit(_frozen, 3)(root)
    later = Path(shutil.move(root / "step-6", tmp_path / "step-6"))
    assert _drill(root).verdict.green
    shutil.move(later, root / "step-6")
    outcome = _drill(root)
    assert (outcome.verdict.green, {f.code for r in outcome.report.results for f in r.findings}) == (True, {"drift.state-keys"})
