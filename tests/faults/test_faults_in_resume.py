"""Every planted fault of a resume is caught by its code, on a real run continued by real trainers; the sound resume passes."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from flows.drill_requests import DrillRequest
from flows.restore_drill import run_drill
from flows.run import PlainRunner
from tasks.drill import Found, gather_evidence
from tasks.restoring.jobs import FolderAsk, ResumeJob
from tasks.restoring.resume import resume_at
from tests.builders.trainer import write_run
from tests.faults.faults_in_resume import RESTORES, RESUMES
from validators.check import attempt
from validators.drills.check import run_drill_check
from validators.drills.checks import DRILL_CHECKS
from validators.drills.evidence import Drilled, DrillEvidence, Resumed, Step
from validators.drills.goals import Goals, Numbers
from validators.drills.log import read_log
from validators.drills.stored import read_stored

SAVED, LAST, STEPS = 6, 20, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of twenty steps, saved at 3 and 6."""
    root = tmp_path_factory.mktemp("resumed") / "run"
    write_run(root, last=LAST)
    return root


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """One process, in a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _resume(run: Path, spec: str, folder: Path, saved_by: int = 1) -> Resumed:
    from tasks.restore import place_difference

    job = ResumeJob((FolderAsk(str(run / f"step-{SAVED}"), "", ()),), spec, 1, STEPS, str(folder))
    answer = attempt(lambda: resume_at(0, 1, job))
    if isinstance(answer, Exception):
        return Resumed(f"step-{SAVED}", SAVED, 1, saved_by, (), refusal=str(answer))
    steps = tuple(Step(SAVED + n, 0, s.loss, s.lr, s.batch, s.rng) for n, s in enumerate(answer.steps, 1))
    differences = tuple(place_difference(d) for d in answer.differences)
    return Resumed(f"step-{SAVED}", SAVED, 1, saved_by, steps, differences, answer.compared)


def _codes(evidence: DrillEvidence, check: str) -> set[str]:
    result = run_drill_check(next(one for one in DRILL_CHECKS if one.name == check), evidence, lambda: 0.0)
    assert result.status != "errored", result.reason
    return {finding.code for finding in result.findings}


def _evidence(run: Path, resumed: Resumed) -> DrillEvidence:
    log = read_log(run.parent / "run.log.jsonl")
    return DrillEvidence("D3", (), "", (), (), Goals(), Numbers(), resumed=resumed, log=log)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=f"{fault.name}-{fault.code}") for fault in RESUMES])
def test_a_trainer_that_restores_wrongly_is_caught(fault, run, group, tmp_path):
    saved_by = 2 if fault.code == "resume.world-changed" else 1
    evidence = _evidence(run, _resume(run, f"tests.builders.faulty_resume:{fault.name}", tmp_path, saved_by))
    assert fault.code in _codes(evidence, "resume")
    if evidence.resumed.steps:
        logged = next(step.loss for step in evidence.log if step.step == SAVED + 1)
        assert (evidence.resumed.steps[0].loss != logged) == fault.changes_first_loss


def test_a_trainer_that_restores_everything_passes(run, group, tmp_path):
    evidence = _evidence(run, _resume(run, "tests.builders.trainer:build", tmp_path))
    assert _codes(evidence, "resume") == set()
    assert len(evidence.resumed.steps) == STEPS


def test_a_trainers_own_values_that_change_by_themselves_are_no_fault(run, group, tmp_path):
    evidence = _evidence(run, _resume(run, "tests.builders.faulty_resume:keeps_time", tmp_path))
    assert {difference.part for difference in evidence.resumed.differences} == {"other"}
    assert _codes(evidence, "resume") == set()


@pytest.fixture(scope="module")
def sound(run, tmp_path_factory) -> DrillEvidence:
    """What a sound drill at D3 saw."""
    folder = tmp_path_factory.mktemp("sound")
    root = Path(shutil.copytree(run, folder / "run"))
    outcome = run_drill(DrillRequest(root=root, runs=folder / "runs", level="D3", max_ranks=2), PlainRunner())
    assert outcome.verdict.green
    return _gathered(outcome.paths.json.parent)


def _gathered(folder: Path) -> DrillEvidence:
    from tasks.drill import DrillFacts

    facts = read_stored(DrillFacts, folder / "facts.json")
    assert read_stored(Found, facts.found).saves
    assert all(read_stored(Drilled, path).nbytes for path in facts.drilled)
    return gather_evidence(facts)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in RESTORES])
def test_a_restore_that_gives_something_else_is_caught(fault, sound):
    check = fault.code.split(".")[0]
    assert _codes(sound, check) == set()
    assert fault.code in _codes(fault.amend(sound), check)
