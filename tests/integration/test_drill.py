"""The drill through its whole line, on runs that torch trained and saved: what is sound is green, what is broken is named."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from flows.drill_requests import DrillRequest
from flows.recording import record_checkpoint
from flows.restore_drill import DrillFailedError, run_drill
from flows.run import Outcome, PlainRunner
from reports.errors import CommitError, FormatError, RequestError
from tasks.drill_history import read_history
from tests.builders.trainer import Run, write_run
from tests.faults.faults_in_checkpoints import load_state, write_state
from tests.unit.drills.test_accepted_reader import Marks
from validators.drills.record import RECORD_NAME


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A run of ten steps, saved at 3 and 6, with its log beside it."""
    root = tmp_path_factory.mktemp("trained") / "run"
    write_run(root)
    return root


@pytest.fixture
def root(trained, tmp_path) -> Path:
    """A copy to damage."""
    shutil.copy(trained.parent / "run.log.jsonl", tmp_path / "run.log.jsonl")
    return Path(shutil.copytree(trained, tmp_path / "run"))


def drill(root: Path, **options: object) -> Outcome:
    """Drill without Prefect; red drills return too."""
    request = DrillRequest.model_validate({"root": root, "runs": root.parent / "runs", "level": "D2", **options})
    try:
        return run_drill(request, PlainRunner())
    except DrillFailedError as red:
        return red.outcome


def codes(outcome: Outcome) -> set[str]:
    """The codes a drill found."""
    assert [r.reason for r in outcome.report.results if r.status == "errored"] == []
    return {f.code for result in outcome.report.results for f in result.findings}


def measured(outcome: Outcome, check: str) -> dict:
    """The numbers of one check."""
    return dict(next(result.measured for result in outcome.report.results if result.check == check))


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_sound_run_is_restorable_and_nothing_of_it_is_changed(root):
    before = _contents(root)
    outcome = drill(root, log=root.parent / "run.log.jsonl")
    assert (outcome.verdict.green, codes(outcome)) == (True, set())
    for path in (outcome.paths.html, outcome.paths.markdown, outcome.paths.junit):
        assert "mapping not proven" not in path.read_text()
    assert outcome.verdict.line.startswith("restorable")
    assert measured(outcome, "commit")["chosen"] == "step-6, step-3"
    assert _contents(root) == before
    found = measured(outcome, "objectives")
    assert (found["rpo, steps"], found["rpo, tokens"], found["rpo from"]) == (4, 48, "the training log")
    assert measured(outcome, "consistency") == {
        **{"train step": 6, "optimizer step": 6, "scheduler step": 6, "folder's step": 6, "tokens": 72}
    }


def test_the_second_drill_compares_with_what_the_first_recorded(root):
    assert measured(drill(root), "state")["recorded now"] == "step-6, step-3"
    again = drill(root)
    assert measured(again, "state")["recorded now"] == "none"
    assert (again.verdict.green, codes(again)) == (True, set())
    history = read_history(root.parent / "runs", root)
    assert [past.run_id for past in again.report.history] == [past.run_id for past in history]
    assert len(history) == 2
    page = again.paths.html.read_text()
    assert page.count("<title>recovery time, s over 2 runs, 0 red") == 1
    assert page.count(history[0].run_id) == 1


def test_recorded_digests_are_those_of_the_values(root):
    path, _ = record_checkpoint(root, (), 6, replace=False, workers=1)
    entries = json.loads(path.read_text())["entries"]
    state = {"model": {"embed.weight": torch.zeros(19, 8)}, "optim": {"state": {"up.bias": {"exp_avg_sq": torch.zeros(13)}}}}
    dcp.load(state, checkpoint_id=root / "step-6", no_dist=True)
    for key, tensor in (
        ("embed.weight", state["model"]["embed.weight"]),
        ("exp_avg_sq/up.bias", state["optim"]["state"]["up.bias"]["exp_avg_sq"]),
    ):
        assert entries[key]["digest"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_a_value_changed_after_it_was_recorded_is_found_by_name(root):
    record_checkpoint(root, (), 6, replace=False, workers=1)
    run = Run(0, 1)
    state = run.state()
    dcp.load(state, checkpoint_id=root / "step-6", no_dist=True)
    state["optim"]["state"]["up.bias"]["exp_avg"][3] += torch.tensor(1e-7)
    sidecar = (root / "step-6" / RECORD_NAME).read_bytes()
    shutil.rmtree(root / "step-6")
    dcp.save(state, checkpoint_id=root / "step-6", no_dist=True)
    (root / "step-6" / RECORD_NAME).write_bytes(sidecar)
    outcome = drill(root)
    changed = [f.where for r in outcome.report.results for f in r.findings if f.code == "state.changed"]
    assert "step-6: exp_avg/up.bias" in changed
    assert not any("exp_avg/up.weight" in where for where in changed)


def test_a_record_is_written_once_and_replaced_only_when_asked(root):
    path, entries = record_checkpoint(root, (), None, replace=False, workers=1)
    assert (path, entries > 20) == (root / "step-6" / RECORD_NAME, True)
    with pytest.raises(CommitError, match="recorded already"):
        record_checkpoint(root, (), None, replace=False, workers=1)
    content = json.loads(path.read_text())
    record_checkpoint(root, (), None, replace=True, workers=2)
    assert json.loads(path.read_text())["entries"] == content["entries"]


def test_a_damaged_record_is_not_taken_for_a_damaged_checkpoint(root):
    path, _ = record_checkpoint(root, (), None, replace=False, workers=1)
    path.write_text(path.read_text().replace("exp_avg", "exp_avh", 1))
    with pytest.raises(FormatError, match="was changed after it was written"):
        drill(root)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda save: (save / ".metadata").unlink(), "commit.uncommitted"),
        (lambda save: (save / "__0_0.distcp").unlink(), "commit.ranks-missing"),
        (lambda save: _truncate(save / "__0_0.distcp"), "commit.cut-short"),
        (lambda save: shutil.copy(save / ".metadata", save / ".metadata.tmp"), "commit.overwritten"),
        (lambda save: (save / ".metadata").write_bytes(b"cos\nsystem\n."), "commit.hostile"),
    ],
)
def test_an_incomplete_newest_save_is_passed_over_with_its_cause(root, damage, code):
    damage(root / "step-6")
    outcome = drill(root)
    assert (outcome.verdict.green, code in codes(outcome)) == (True, True)
    assert measured(outcome, "commit")["chosen"] == "step-3"


def test_a_flipped_bit_turns_the_verdict_and_the_older_save_is_chosen(root):
    path = root / "step-6" / "__0_0.distcp"
    state = {"model": {"up.weight": torch.zeros(13, 8)}}
    dcp.load(state, checkpoint_id=root / "step-6", no_dist=True)
    content = bytearray(path.read_bytes())
    content[content.index(state["model"]["up.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    outcome = drill(root)
    assert "commit.damaged" in codes(outcome)
    assert (outcome.verdict.green, measured(outcome, "commit")["chosen"]) == (False, "step-3")


def test_damaged_copies_are_refused_and_the_save_before_is_chosen(root):
    found = measured(drill(root), "negative")
    assert found == {f"__0_0.distcp {how}": "step-3" for how in ("truncated", "removed", "emptied")}


def test_a_run_of_one_save_has_nothing_to_fall_back_to(root):
    shutil.rmtree(root / "step-3")
    outcome = drill(root)
    assert outcome.verdict.green
    assert set(measured(outcome, "negative").values()) == {"refused, no older save"}


def test_no_complete_save_is_red(root):
    for step in (3, 6):
        (root / f"step-{step}" / ".metadata").unlink()
    outcome = drill(root)
    assert "commit.none-complete" in codes(outcome)
    assert not outcome.verdict.green
    assert outcome.paths.html.is_file()


def test_runs_inside_the_run_are_refused(root):
    with pytest.raises(RequestError, match="lies inside the run"):
        drill(root, runs=root / "runs")


@pytest.mark.parametrize(("content", "told"), [("- 1", "not a mapping"), ("rto: 3", "no goal 'rto'"), ("rto_seconds: soon", "rto_seconds")])
def test_goals_that_are_none_are_refused(root, content, told):
    (root.parent / "drill.yaml").write_text(content)
    with pytest.raises(RequestError, match=told):
        drill(root, goals=root.parent / "drill.yaml")


def test_a_log_line_that_is_no_step_is_refused(root):
    (root.parent / "log").write_text('{"step": 1, "rank": 0}\n{"loss": 1}\n')
    with pytest.raises(RequestError, match="line 2 is no "):
        drill(root, log=root.parent / "log")


@pytest.mark.slow
def test_training_of_two_ranks_continues_bit_for_bit(tmp_path):
    root = tmp_path / "run"
    log = write_run(root, world=2, saves=(3, 6), last=12)
    before = _contents(root)
    outcome = drill(root, level=None, log=log, resume="tests.builders.trainer:build", max_ranks=4)
    assert (codes(outcome), outcome.verdict.green) == (set(), True)
    found = measured(outcome, "resume")
    assert (found["ranks"], found["steps compared with the log"], found["largest difference of a loss"]) == (2, 12, 0.0)
    restored = measured(outcome, "restore")
    assert restored["world sizes"] == "2, 1, 4, 2"
    assert restored["saved again"] > 40
    assert set(outcome.report.history[-1].__slots__) >= {"rto_seconds"}
    assert measured(outcome, "objectives")["rto first step, s"] > 0
    assert _contents(root) == before
    with pytest.raises(RequestError, match="a save of 2 ranks, and --max-ranks is 1"):
        drill(root, level=None, log=log, resume="tests.builders.trainer:build", max_ranks=1)


@pytest.mark.slow
def test_a_log_of_the_first_rank_only_resumes_with_all_that_saved(tmp_path):
    root = tmp_path / "run"
    log = write_run(root, world=2, last=9)
    lines = [line for line in log.read_text().splitlines() if json.loads(line)["rank"] == 0]
    (tmp_path / "first.jsonl").write_text("\n".join(lines))
    outcome = drill(root, level=None, log=tmp_path / "first.jsonl", resume="tests.builders.trainer:build", max_ranks=2)
    assert (codes(outcome), outcome.verdict.green) == (set(), True)
    found = measured(outcome, "resume")
    assert (found["ranks"], found["largest difference of a loss"]) == (2, 0.0)
    assert found["steps compared with the log"] > 0


def _split(root: Path, other: Path, pattern: str) -> None:
    """Move files to another node's disk."""
    for path in sorted(root.rglob(pattern)):
        there = other / path.relative_to(root)
        there.parent.mkdir(parents=True, exist_ok=True)
        path.rename(there)


@pytest.mark.slow
def test_a_run_on_two_disks_is_restored_resumed_and_sabotaged_like_one(tmp_path):
    root, other = tmp_path / "node0" / "run", tmp_path / "node1"
    log = write_run(root, world=2, last=12)
    _split(root, other, "__1_*.distcp")
    before = _contents(root) | _contents(other)
    assert "commit.none-complete" in codes(drill(root, runs=tmp_path / "runs"))
    asked = {"runs": tmp_path / "runs", "also": [other], "log": log, "max_ranks": 4}
    outcome = drill(root, level=None, resume="tests.builders.trainer:build", **asked)
    assert (codes(outcome), outcome.verdict.green) == (set(), True)
    assert measured(outcome, "restore")["world sizes"] == "2, 1, 4, 2"
    assert measured(outcome, "resume")["largest difference of a loss"] == 0.0
    assert measured(outcome, "negative") == {f"__0_0.distcp {how}": "step-3" for how in ("truncated", "removed", "emptied")}
    assert _contents(root) | _contents(other) == before


def test_one_save_on_two_disks_is_recorded_and_found_again(root, tmp_path):
    _split(root, tmp_path / "node1", "*.distcp")
    _, entries = record_checkpoint(root, (tmp_path / "node1",), 6, replace=False, workers=1)
    outcome = drill(root / "step-6", also=[tmp_path / "node1" / "step-6"])
    assert (codes(outcome) - {"components.random-numbers"}, outcome.verdict.green) == (set(), True)
    assert measured(outcome, "state")["compared with a record"] == entries


def test_continuing_from_a_format_that_torch_does_not_restore_is_refused_before_anything_is_read(tmp_path):
    save = Path(__file__).parents[1] / "golden" / "deepspeed" / "zero1_frozen" / "ckpt"
    with pytest.raises(RequestError, match=r"which reads dcp; .* is zero"):
        drill(save, runs=tmp_path / "runs", level=None, resume="tests.builders.trainer:build")
    assert not list(tmp_path.rglob("*.drilled.json"))


@pytest.mark.slow
def test_a_trainer_that_raises_is_told_with_its_own_words(root):
    outcome = drill(root, level=None, resume="tests.builders.faulty_resume:raises", log=root.parent / "run.log.jsonl", max_ranks=1)
    (told,) = [f.found for r in outcome.report.results for f in r.findings if f.code == "resume.refused"]
    assert told.startswith("RuntimeError at faulty_resume.py")
    assert "the tokenizer is gone" in told


@pytest.mark.slow
def test_a_hostile_object_of_the_state_is_refused_by_name_and_does_not_run(root, tmp_path):
    state = load_state(root / "step-6")
    state["lr_scheduler"]["last_epoch"] = Marks(tmp_path / "ran")
    write_state(state, root / "step-6")
    outcome = drill(root, level=None, resume="tests.builders.trainer:build", log=root.parent / "run.log.jsonl", max_ranks=1)
    (told,) = [f.found for r in outcome.report.results for f in r.findings if f.code == "resume.refused"]
    assert "pickle asks for posix.mkdir, which is not in the closed list; nothing of it was run" in told
    assert not (tmp_path / "ran").exists()
