"""The saves of a run: numeric order, what is complete, and one word for what is wrong with the others."""

import shutil
from pathlib import Path

import pytest
import torch

from tasks.saves import list_saves
from tests.builders.dcp import save_alone


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (900, 9900, 10000):
        save_alone({"model": {"a": torch.ones(4, 3)}}, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def test_steps_are_ordered_as_numbers(root):
    assert [save.step for save in list_saves(root).saves] == [900, 9900, 10000]


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda folder: (folder / ".metadata").unlink(), "uncommitted"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "ranks-missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"PK"), "cut-short"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04"), "cut-short"),
        (lambda folder: shutil.copy(folder / ".metadata", folder / ".metadata.tmp"), "overwritten"),
        (lambda folder: (folder / ".metadata").write_bytes(b"cos\nsystem\n."), "hostile"),
    ],
)
def test_what_is_wrong_with_a_save_has_a_word(root, damage, cause):
    damage(root / "step-10000")
    saves = list_saves(root)
    assert [save.step for save in saves.complete()] == [900, 9900]
    assert (saves.saves[-1].cause, "step-10000" in saves.saves[-1].refusal) == (cause, True)


def test_what_interrupted_writers_left_is_listed(root):
    (root / "step-900" / "__1_0.distcp").touch()
    (root / "step-900" / "weights.tmp").write_bytes(b"x")
    (root / "step-11000.tmp").mkdir()
    saves = list_saves(root)
    assert saves.saves[0].leftovers == ("__1_0.distcp", "weights.tmp")
    assert saves.leftovers == ("step-11000.tmp",)


def test_a_pointer_beside_the_saves_is_read(root):
    (root / "latest").write_text("step-9900\n")
    assert list_saves(root).pointer == "step-9900"


def test_one_save_alone_is_a_run_of_one(root):
    saves = list_saves(root / "step-900")
    assert [(save.name, save.step) for save in saves.saves] == [("step-900", 900)]
    assert saves.interval_seconds() == 0


def test_a_save_whose_optimizer_folder_is_broken_is_not_complete(tmp_path):
    for step in (1, 2):
        save_alone({"model": {"a": torch.ones(4, 3)}}, tmp_path / f"checkpoint_{step}" / "pytorch_model_fsdp_0")
        save_alone({"optimizer": {"state": {"a": {"exp_avg": torch.ones(4, 3)}}}}, tmp_path / f"checkpoint_{step}" / "optimizer_0")
    (tmp_path / "checkpoint_2" / "optimizer_0" / "__0_0.distcp").unlink()
    saves = list_saves(tmp_path).saves
    assert [save.cause for save in saves] == ["", "ranks-missing"]


def test_a_link_to_a_disk_that_is_gone_is_an_incomplete_save_and_no_silence(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-7").symlink_to(tmp_path / "unmounted" / "step-7")
    (tmp_path / "latest").symlink_to(tmp_path / "unmounted")
    saves = list_saves(tmp_path).saves
    assert [(save.step, save.is_complete) for save in saves] == [(3, False), (7, False)]
    assert "does not exist" in saves[1].refusal
