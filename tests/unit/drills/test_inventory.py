"""The inventory and the ten questions, on checkpoints that torch wrote: each way a component can be there, be derived, or be missing."""

import json
import pickle
import random
from pathlib import Path

import pytest
import torch

from tasks.engine.formats.readers import READERS, open_checkpoint
from tasks.engine.restoring.facts import gather_facts
from tests.builders.dcp import save_alone
from validators.drills.inventory import ROWS, take_inventory
from validators.drills.readiness import RESHARDABLE, SHARDING_METADATA, Declared, Surroundings, answer_readiness

ALONE = Surroundings()
MODEL = {"a": torch.ones(3, 2), "b": torch.ones(2)}


def _optimizer(**changed: object) -> dict:
    state = {name: {"exp_avg": value * 0.1, "exp_avg_sq": value * 0.01, "step": torch.tensor(4.0)} for name, value in MODEL.items()}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(MODEL)}]} | changed


FULL = {
    "model": MODEL,
    "optim": _optimizer(),
    "lr_scheduler": {"last_epoch": 4, "_last_lr": [0.1]},
    "train_state": {"step": 4, "ntokens_seen": 96},
    "rng": {"rank_0": pickle.dumps({"python": random.getstate(), "torch": torch.get_rng_state()})},
    "dataloader": {"dp_rank_0": pickle.dumps({"samples_yielded": 8}), "world_size": 1},
}


def _facts(state: dict, folder: Path):
    save_alone(state, folder)
    return gather_facts(open_checkpoint(folder))


def _found(state: dict, folder: Path) -> dict[str, tuple[str, str]]:
    return {part.name: (part.presence, part.detail) for part in take_inventory(_facts(state, folder))}


def test_a_full_save_has_what_a_resume_needs(tmp_path):
    found = _found(FULL, tmp_path / "step-4")
    assert found["model"] == ("present", "2 tensors of F32")
    assert found["optimizer moments"] == ("present", "exp_avg of 2 parameters, exp_avg_sq of 2 parameters; F32")
    assert found["optimizer step"][0] == "present"
    assert found["train step"] == ("present", "4")
    assert found["random numbers"] == ("present", "of python, torch on the CPU")
    assert found["data position"][0] == found["consumed samples"][0] == "present"
    assert found["consumed tokens"] == ("present", "96")
    assert found["master weights"] == ("derivable", "the model itself: it is saved in fp32")
    assert found["versions"][0] == "missing"


def test_every_row_answers_for_every_checkpoint(tmp_path):
    assert len(_found({"model": MODEL}, tmp_path / "save")) == len(ROWS) + 3  # the model, the layout, what context parallelism changes


@pytest.mark.parametrize(
    ("left_out", "name", "presence"),
    [
        ("optim", "optimizer moments", "missing"),
        ("lr_scheduler", "lr scheduler", "derivable"),
        ("rng", "random numbers", "missing"),
        ("dataloader", "data position", "derivable"),
        ("train_state", "train step", "derivable"),  # the folder's name
    ],
)
def test_what_is_left_out_is_named(tmp_path, left_out, name, presence):
    assert _found({key: value for key, value in FULL.items() if key != left_out}, tmp_path / "step-4")[name][0] == presence


def test_nothing_can_be_derived_from_a_save_without_any_step(tmp_path):
    found = _found({"model": MODEL}, tmp_path / "save")
    assert {presence for name, (presence, _) in found.items() if name not in ("model", "master weights", "gradient scaler")} == {"missing"}


def test_low_precision_weights_without_a_copy_have_no_master(tmp_path):
    low = {name: value.bfloat16() for name, value in MODEL.items()}
    assert _found({"model": low, "optim": _optimizer()}, tmp_path / "a")["master weights"][0] == "missing"
    master = {"state": {name: {"master_param": value} for name, value in MODEL.items()}}
    assert _found({"model": low, "optim": master}, tmp_path / "b")["master weights"] == ("present", "master of 2 parameters; F32")


def test_fp16_training_needs_its_scaler(tmp_path):
    low = {name: value.half() for name, value in MODEL.items()}
    assert _found({"model": low}, tmp_path / "a")["gradient scaler"][0] == "missing"
    assert _found({"model": low, "grad_scaler": {"scale": 1024.0}}, tmp_path / "b")["gradient scaler"] == ("present", "1024.0")


def test_an_object_outside_the_closed_list_is_listed_unopened(tmp_path):
    found = _found({"model": MODEL, "lr_scheduler": {"lr_lambdas": [pickle.loads]}}, tmp_path / "save")
    assert found["lr scheduler"][0] == "present"
    assert "not opened: pickle asks for pickle.loads" in found["lr scheduler"][1]


def _answers(facts, around: Surroundings = ALONE) -> dict[str, tuple[str, str]]:
    return {answer.question: (answer.answer, answer.evidence) for answer in answer_readiness(facts, around)}


def test_ten_questions_are_answered_with_evidence(tmp_path):
    answers = _answers(_facts(FULL, tmp_path / "step-4"))
    assert len(answers) == 10
    assert all(answer and evidence for answer, evidence in answers.values())
    assert answers["Is it full or model-only?"][0] == "full"
    assert answers["What does training do when a save fails?"][0] == "not declared"
    assert answers["Is the optimizer state there and whole?"][1].endswith("2 of 2 model tensors have moments of their own shape")


def test_tensors_without_moments_are_named(tmp_path):
    half = {**FULL, "model": {**FULL["model"], "head.weight": torch.zeros(2, 3)}}
    there = _answers(_facts(half, tmp_path / "step-4"))["Is the optimizer state there and whole?"][1]
    assert there.endswith("2 of 3 model tensors have moments of their own shape, not head.weight")


def test_a_model_only_save_is_called_so(tmp_path):
    assert _answers(_facts({"model": MODEL}, tmp_path / "step-4"))["Is it full or model-only?"][0] == "model only"


def test_what_the_owner_declares_is_answered(tmp_path):
    declared = Declared(on_failed_save="stops after 3 tries", export_schedule="nightly", keep=3, budget_nbytes=10**12)
    around = Surroundings(("step-2", "step-4"), 60.0, 1000, 10**9, "2026-11-29 D3", "export-1 green", declared)
    answers = _answers(_facts(FULL, tmp_path / "step-4"), around)
    assert answers["What does training do when a save fails?"][0] == "stops after 3 tries"
    assert answers["Is a release export scheduled?"] == ("nightly", "export-1 green")
    assert "2 kept of 3 declared" in answers["Save interval, number kept, storage budget?"][0]
    assert answers["When did a restore test last pass?"][0] == "2026-11-29 D3"


def test_a_trainers_files_beside_whole_weights_are_read(tmp_path):
    from safetensors.torch import save_file

    save_file(MODEL, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state": {0: {"exp_avg": MODEL["a"], "step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1}]}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 4, "epoch": 0.5}))
    found = {part.name: part for part in take_inventory(gather_facts(open_checkpoint(tmp_path)))}
    assert found["train step"].detail == "4"
    assert found["optimizer moments"].presence == "present"
    assert found["optimizer step"].presence == "present"


def test_the_checklist_knows_every_format():
    names = {reader.name for reader in READERS}
    assert (set(SHARDING_METADATA), set(RESHARDABLE)) == (names, names)
