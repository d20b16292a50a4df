"""What lies in a run's own root and names a save keeps it: pointer files, links, Trainer's memory of the best model. And reports' names."""

import json
import time

import pytest

from tasks.claims import find_claims
from tasks.pointed import find_pointed
from tasks.saves import list_saves
from tasks.sight import see_saves
from tests.builders.many_saves import make_saves, report_on, written_at
from validators.retention.evidence import SeenSave


def _named(root):
    return {claim.name: claim.because for claim in find_pointed(root.resolve(), see_saves(root))}


@pytest.fixture
def root(tmp_path):
    return make_saves(tmp_path / "run", range(10, 60, 10))


def test_a_root_without_pointers_names_nothing(root):
    assert _named(root) == {}


def test_every_pointer_file_counts_and_not_the_first_alone(root):
    (root / "latest").write_text("step-20\n")
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    assert set(_named(root)) == {"step-20", "step-30"}


@pytest.mark.parametrize(
    "text",
    [
        "step-20/",
        "./step-20",
        "run/step-20\n",
        "/data/run/step-20",
        '"step-20"',
        "\ufeffstep-20",
        "step-20\nstep-50",
        '{"path": "step-20"}',
        "0020",
    ],
)
def test_a_pointer_may_say_it_in_many_ways(root, text):
    (root / "latest").write_text(text)
    assert "step-20" in _named(root)


def test_a_pointer_that_is_a_link_to_a_text_says_what_that_says(root):
    (root / "pointer.txt").write_text("step-20")
    (root / "latest").symlink_to("pointer.txt")
    assert set(_named(root)) == {"step-20"}


def test_any_short_text_beside_the_saves_holds_what_it_names(root):
    (root / "best.txt").write_text("run/step-20\n")
    (root / "config.json").write_text('{"warmup": 30}')
    (root / "train.log").write_text("saved step-40\n" * 100)  # a log names all of them
    (root / "weights.bin").write_bytes(b"\xff\x00step-30x\x00")
    assert _named(root) == {"step-20": "the file best.txt names it"}


def test_the_newest_state_by_time_tells_the_best_model_too(root):
    # Training went back to step 20; what it left behind had another best one.
    for step, seconds, best in ((50, 50, "out/step-40"), (20, 90, "out/step-10")):
        (root / f"step-{step}" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": best}))
        written_at(root / f"step-{step}", seconds)
    assert set(_named(root)) == {"step-10", "step-40"}


def test_a_state_that_is_being_written_does_not_hide_the_one_before_it(root):
    for step, text in ((40, json.dumps({"best_model_checkpoint": "out/step-10"})), (50, '{"best_model_checkpoint": "out/st')):
        (root / f"step-{step}" / "trainer_state.json").write_text(text)
        written_at(root / f"step-{step}", step)
    assert set(_named(root)) == {"step-10"}


@pytest.mark.parametrize("target", ["step-20", "step-20/inner", "../run/step-20", "{root}/step-20"])
def test_a_link_in_the_root_names_where_it_leads(root, target):
    (root / "best").symlink_to(target.format(root=root))
    assert _named(root) == {"step-20": "the link best leads to it"}


def test_a_step_that_is_a_link_to_another_names_that_one(root):
    (root / "step-25").symlink_to("step-20")
    assert set(_named(root)) == {"step-20"}


@pytest.mark.parametrize("target", ["nowhere", "..", ".", "/"])
def test_links_that_lead_to_no_save_name_none(root, target):
    (root / "best").symlink_to(target)
    assert _named(root) == {}


@pytest.mark.parametrize("best", ["out/step-20", "/data/out/step-20", "step-20"])
def test_the_best_model_is_what_the_newest_state_of_trainer_says(root, best):
    # transformers' TrainerState: every checkpoint tells the best one at its time
    for step, told in ((30, "out/step-10"), (50, best)):
        (root / f"step-{step}" / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": told, "global_step": step}))
    assert _named(root) == {"step-20": "the best model by step-50/trainer_state.json"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"best_model_checkpoint": null}', '{"best_model_checkpoint": 3}'])
def test_a_state_that_knows_no_best_model_names_none(root, text):
    (root / "trainer_state.json").write_text(text)
    assert _named(root) == {}


def test_claims_of_many_reports_do_not_take_time_for_every_save(tmp_path):
    # 30 reports and 10,000 saves took half a minute when each pair was compared
    saves = tuple(SeenSave(f"step-{step}", step, 1, 0.0) for step in range(10_000))
    for number in range(30):
        report_on(tmp_path / "runs", f"gate-{number:02}", f"{tmp_path}/run/step-{number}")
    begun = time.process_time()
    claims = find_claims(tmp_path / "runs", tmp_path / "run", saves)
    assert time.process_time() - begun < 3
    assert [claim.name for claim in claims] == [f"step-{number}" for number in range(30)]


def test_links_that_lead_to_themselves_name_nothing_and_stop_nothing(root):
    (root / "latest").symlink_to("latest")
    (root / "step-60").symlink_to("step-60")
    assert _named(root) == {}
    assert [save.name for save in list_saves(root).saves if save.cause] == ["step-60"]
