"""How a path becomes a reader: a run's root, its steps, and paths that are no checkpoint."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError, HostilePickleError
from tasks.engine.formats.folders import STEP_FOLDERS, list_steps, step_of
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.dcp import save_alone

# pattern → a name it is for, and the step
NAMED = {
    "step-500": 500,
    "step500": 500,
    "step_7": 7,
    "checkpoint-20": 20,
    "checkpoint_2": 2,
    "global_step500": 500,
    "global_step_90": 90,
    "iter_0000500": 500,
    "epoch=0-step=500.ckpt": 500,
    "epoch_0_step_500": 500,
    "ep3-ba120": 120,
    "epoch_4": 4,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        save_alone({"model": {"a": torch.full((2,), float(step))}}, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def _refusal(path: Path, **asked: object) -> str:
    with pytest.raises(FormatError) as refused:
        open_checkpoint(path, **asked)
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("name", "step"), NAMED.items(), ids=NAMED)
def test_step_folders_are_known_by_name(tmp_path, name, step):
    (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == {step: [name]}
    assert step_of(tmp_path / name) == step_of(tmp_path / name / "model") == step


def test_every_pattern_has_a_name_here():
    assert [pattern.pattern for pattern in STEP_FOLDERS if not any(pattern.match(name) for name in NAMED)] == []


@pytest.mark.parametrize("name", ["stepping-3", "step-3-old", "my-step-3", "step-", "steps", "runs"])
def test_other_folders_are_no_steps(tmp_path, name):
    (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == {}


def test_the_newest_step_is_the_one_of_the_largest_number(run):
    assert open_checkpoint(run).catalog().step == 100


def test_a_step_is_opened_when_asked_for(run):
    catalog = open_checkpoint(run, step=9).catalog()
    assert (catalog.step, catalog.root) == (9, str(run / "step-9"))


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run):
    assert "has no step 11; there are 9, 10, 100" in _refusal(run, step=11)


def test_an_incomplete_step_is_passed_over_with_a_note(run):
    (run / "step-100" / ".metadata").unlink()
    catalog = open_checkpoint(run).catalog()
    assert catalog.step == 10
    assert len(catalog.notes) == 1
    assert catalog.notes[0].startswith("step-100 passed over: ")
    assert "incomplete save" in catalog.notes[0]


def test_an_empty_newest_step_is_passed_over(run):
    (run / "step-200").mkdir()
    assert open_checkpoint(run).catalog().step == 100


def test_an_incomplete_step_is_not_passed_over_when_it_is_the_one_asked_for(run):
    (run / "step-100" / ".metadata").unlink()
    with pytest.raises(FormatError, match="incomplete save"):
        open_checkpoint(run, step=100)


def test_a_hostile_step_is_never_passed_over(run):
    (run / "step-100" / ".metadata").write_bytes(b"cposix\nsystem\n.")
    with pytest.raises(HostilePickleError):
        open_checkpoint(run)


def test_a_run_without_a_complete_step_gives_each_reason(run):
    for step in (9, 10, 100):
        (run / f"step-{step}" / ".metadata").unlink()
    told = _refusal(run)
    assert "has no complete step" in told
    assert all(f"step-{step} passed over" in told for step in (9, 10, 100))


def test_one_step_under_two_names_is_refused(run):
    shutil.copytree(run / "step-100", run / "checkpoint-100")
    assert "has step 100 more than once: checkpoint-100, step-100" in _refusal(run)


def test_a_step_asked_of_a_single_checkpoint_must_be_its_own(run):
    assert open_checkpoint(run / "step-9", step=9).catalog().step == 9
    assert "is step 9, not step 10" in _refusal(run / "step-9", step=10)


def test_other_nodes_roots_may_be_runs_too(run, tmp_path):
    other = tmp_path / "node1"
    (other / "step-100").mkdir(parents=True)
    shutil.move(run / "step-100" / "__0_0.distcp", other / "step-100")
    assert open_checkpoint(run, also=[other]).catalog().step == 100


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    assert "does not exist" in _refusal(tmp_path / "absent")


def test_another_nodes_path_that_does_not_exist_is_refused(run, tmp_path):
    with pytest.raises(FormatError, match="absent: does not exist"):
        open_checkpoint(run, also=[tmp_path / "absent"])


def test_a_file_is_refused_with_the_folder_to_point_at(run):
    path = run / "step-9" / "__0_0.distcp"
    assert f"is a file, a checkpoint is a folder. Point at the folder: {path.parent}" in _refusal(path)


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is an empty folder" in _refusal(tmp_path / "empty")


def test_a_path_behind_a_folder_without_permission_is_refused(run, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert "cannot be read: Permission denied" in _refusal(run)


def test_a_folder_without_permission_is_refused(run, monkeypatch):
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert "cannot be read: Permission denied" in _refusal(run)
