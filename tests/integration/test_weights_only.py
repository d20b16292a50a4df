"""Thinning: weights stay whole whatever happens, and what is left of a save is told from a whole one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.saves import list_saves
from tests.builders.cases import find_case
from tests.builders.many_saves import names_in, trainers_save, verify, written_at
from tests.integration.test_retention import keep, kept
from validators.drills.commit import examine
from validators.drills.evidence import DrillEvidence
from validators.drills.goals import Goals, Numbers


def _run(tmp_path: Path, *steps: int) -> Path:
    for step in steps:
        trainers_save(tmp_path / "run" / f"checkpoint-{step}")
    verify(tmp_path / "run", tmp_path / "runs", [f"checkpoint-{step}" for step in steps[-2:]])
    return tmp_path / "run"


def test_a_thinning_that_was_killed_is_finished_by_the_next_run_whatever_the_policy(tmp_path, monkeypatch):
    root = _run(tmp_path, *range(1, 7))
    unlink = Path.unlink

    def fail(path: Path, **options: bool) -> None:
        if path.name == "scheduler.pt":
            raise OSError(5, "Input/output error")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", fail)
    begun = keep(root, "keep_last: 2\nweights_only_every_steps: 2\n", apply=True)
    monkeypatch.undo()
    assert [name for name, _ in begun.left] == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    assert (root / "checkpoint-2" / "shardwright.thinned.json").is_file()
    assert not (root / "checkpoint-2" / "optimizer.pt").exists()
    dry = keep(root, "keep_last: 6\n")
    assert [decision.name for decision in dry.planned.plan.of("thin")] == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    keep(root, "keep_last: 6\n", apply=True)
    assert {path.name for path in (root / "checkpoint-2").iterdir()} == {
        "model.safetensors",
        "trainer_state.json",
        "shardwright.thinned.json",
    }
    again = keep(root, "keep_last: 6\n")
    assert again.planned.plan.of("thin") == ()
    assert again.report.results[0].findings == ()


def test_the_mark_is_there_before_anything_is_deleted(tmp_path, monkeypatch):
    root = _run(tmp_path, *range(1, 7))
    seen: dict[str, bool] = {}
    unlink = Path.unlink

    def look_and_unlink(path: Path, **options: bool) -> None:
        seen[f"{path.parent.name}/{path.name}"] = (path.parent / "shardwright.thinned.json").is_file()
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", look_and_unlink)
    keep(root, "keep_last: 2\nweights_only_every_steps: 2\n", apply=True)
    assert {name: there for name, there in seen.items() if name.endswith(".pt")} == {
        f"checkpoint-{step}/{name}": True for step in (1, 2, 4) for name in ("optimizer.pt", "scheduler.pt")
    }


def test_a_save_that_is_written_again_over_a_mark_is_a_whole_one(tmp_path):
    root = _run(tmp_path, *range(1, 7))
    keep(root, "keep_last: 2\nweights_only_every_steps: 2\n", apply=True)
    for step in (5, 6):  # training went back, and Trainer writes into the folder that is there
        shutil.rmtree(root / f"checkpoint-{step}")
    torch.save({"again": 1}, root / "checkpoint-4" / "optimizer.pt")
    torch.save({"again": 1}, root / "checkpoint-4" / "scheduler.pt")
    retained = keep(root, apply=True)
    assert (root / "checkpoint-4" / "optimizer.pt").is_file()
    assert (root / "checkpoint-4" / "scheduler.pt").is_file()
    assert retained.planned.plan.blocked


def test_what_somebody_names_is_not_thinned_further(tmp_path):
    root = _run(tmp_path, *range(1, 7))
    stat = (root / "checkpoint-2" / "scheduler.pt").stat()
    mark = {"deleted": {"optimizer.pt": [1, 1], "scheduler.pt": [stat.st_size, stat.st_mtime_ns]}}
    (root / "checkpoint-2" / "optimizer.pt").unlink()
    (root / "checkpoint-2" / "shardwright.thinned.json").write_text(json.dumps(mark))
    (root / "latest").write_text("checkpoint-2")
    keep(root, "keep_last: 6\n", apply=True)
    assert (root / "checkpoint-2" / "scheduler.pt").is_file()


def test_one_of_each_stretch_is_thinned_however_often_it_runs(tmp_path):
    root = _run(tmp_path, *range(1, 13))
    for _ in range(4):
        keep(root, "keep_last: 2\nweights_only_every_steps: 100\n", apply=True)
    assert {path.parent.name for path in root.glob("*/shardwright.thinned.json")} == {"checkpoint-1"}
    assert names_in(root) == {"checkpoint-1", "checkpoint-11", "checkpoint-12"}


@pytest.mark.parametrize("restored", [{"optimizer.pt", "scheduler.pt"}, {"optimizer.bin", "rng_state_0.pth"}])
def test_a_save_whose_state_is_back_is_a_whole_one(tmp_path, restored):
    # From a backup, with its times; or by another version of the trainer, under other names.
    root = _run(tmp_path, *range(1, 7))
    shutil.copytree(root / "checkpoint-4", tmp_path / "backup")
    keep(root, "keep_last: 2\nweights_only_every_steps: 2\n", apply=True)
    for name in restored:
        source = tmp_path / "backup" / name
        shutil.copy2(source if source.exists() else tmp_path / "backup" / "optimizer.pt", root / "checkpoint-4" / name)
    keep(root, "keep_last: 2\npins: [{step: 4, because: we resume from here}]\n", apply=True)
    assert {path.name for path in (root / "checkpoint-4").iterdir()} >= restored


@pytest.mark.cases
@pytest.mark.parametrize("placeholder", [None, {"model.embed_tokens.weight": torch.empty(0)}, {}])
def test_a_zero_3_save_of_trainer_has_its_weights_in_its_training_state(tmp_path, placeholder):
    # Without stage3_gather_16bit_weights_on_model_save
    for step in range(1, 7):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(find_case("ds_zero3_bf16") / "ckpt", folder, copy_function=shutil.copyfile)
        (folder / "trainer_state.json").write_text("{}")
        if placeholder is not None:
            save_file(placeholder, folder / "model.safetensors")
        written_at(folder, step)
    root = tmp_path / "run"
    verify(root, tmp_path / "runs", ["checkpoint-5", "checkpoint-6"])
    retained = keep(root, "keep_last: 2\nweights_only_every_steps: 2\n", apply=True)
    assert retained.planned.plan.of("thin") == ()
    assert "retention.not-thinned" in {found.code for found in retained.report.results[0].findings}


def test_a_save_that_lacks_the_state_that_others_have_is_not_whole(tmp_path):
    root = _run(tmp_path, *range(1, 9))
    for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):  # killed after the weights
        (root / "checkpoint-4" / name).unlink()
    retained = keep(root, "keep_last: 1\nevery_steps: 4\n")
    assert kept(retained) == {f"checkpoint-{step}" for step in (1, 4, 5, 7, 8)}
    assert "its training state is missing" in str(retained.planned.plan.decisions[3].because)


def test_saves_of_weights_alone_are_whole_where_no_other_has_more(tmp_path):
    root = tmp_path / "run"
    for step in range(1, 7):
        folder = trainers_save(root / f"checkpoint-{step}")
        (folder / "optimizer.pt").unlink()
        (folder / "scheduler.pt").unlink()
    verify(root, tmp_path / "runs", ["checkpoint-5", "checkpoint-6"])
    assert kept(keep(root, "keep_last: 2\n")) == {"checkpoint-5", "checkpoint-6"}


def test_a_drill_passes_thinned_saves_by(tmp_path):
    root = _run(tmp_path, *range(1, 7))
    keep(root, "keep_last: 2\nweights_only_every_steps: 2\n", apply=True)
    found = list_saves(root)
    assert {save.name: save.cause for save in found.saves if save.cause} == dict.fromkeys(
        ("checkpoint-1", "checkpoint-2", "checkpoint-4"), "thinned"
    )
    numbers = Numbers()
    told = examine(DrillEvidence("D1", found.saves, "", (), (), Goals(), numbers))
    assert {one.code for one in told.findings} == {"commit.none-complete"}  # nothing was read here; and none about the thinned ones
