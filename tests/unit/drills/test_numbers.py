"""Recovery time, work lost, intervals: worked by hand."""

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.drill_requests import DrillRequest
from reports.errors import RequestError
from tasks.drill import lose_from_log
from tasks.restore import choose_worlds, count_ranks, part_of
from tasks.restoring.trainer import refuse_unfound
from tasks.restoring.worker import first_cause
from validators.drills.evidence import Drilled, Save, Step
from validators.drills.facts import StateFacts
from validators.drills.goals import Goals, Numbers, save_share, young_interval
from validators.drills.readiness import Declared


def test_youngs_interval_of_three_hours_and_half_a_minute():
    assert young_interval(3 * 3600, 30) == pytest.approx(13.4 * 60, rel=0.01)
    assert young_interval(0, 30) == 0


def test_the_share_of_time_in_saves_is_of_the_interval():
    assert save_share(Goals(save_seconds=30), Numbers(interval_seconds=600)) == pytest.approx(0.05)
    assert save_share(Goals(save_seconds=30, declared=Declared(save_interval_seconds=300)), Numbers(interval_seconds=600)) == pytest.approx(
        0.1
    )
    assert save_share(Goals(save_seconds=30), Numbers()) == 0


def test_recovery_time_is_the_sum_of_its_phases():
    numbers = Numbers(rto={"find": 1.0, "read": 2.5, "load": 3.0, "first step": 0.5}, nbytes=10, read_seconds=2.5)
    assert math.isclose(numbers.rto_seconds, 7.0)
    assert math.isclose(numbers.bytes_per_second, 4.0)


@pytest.mark.parametrize(
    ("saved", "limit", "worlds"),
    [(2, 8, (2, 1, 4)), (4, 8, (4, 2, 8, 1)), (1, 8, (1, 2)), (3, 4, (3, 1)), (256, 8, (1,)), (8, 4, (4, 1))],
)
def test_worlds_are_saved_half_double_and_one(saved, limit, worlds):
    assert choose_worlds(saved, limit) == worlds


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("model.embed.weight", "model"),
        ("optim.state.embed.weight.exp_avg", "first moment"),
        ("optim.state.embed.weight.exp_avg_sq", "second moment"),
        ("optim.state.embed.weight.step", "step"),
        ("optim.param_groups.0.lr", "hyperparameter"),
        ("lr_scheduler.last_epoch", "scheduler"),
        ("rng.rank_0.torch", "rng"),
        ("dataloader.dp_rank_0.samples_yielded", "data"),
        ("train_state.step", "counter"),
    ],
)
def test_values_of_the_state_have_their_part(key, part):
    assert part_of(key) == part


def test_the_cause_is_what_a_rank_says_of_itself():
    told = ["Connection closed by peer [127.0.0.1]", "", "KeyError at trainer.py:9: 'dataloader'"]
    assert first_cause(told) == told[2]
    assert first_cause(["", ""]) == ""
    assert first_cause(["rank 1 ended without an answer"]) == "rank 1 ended without an answer"


@pytest.mark.parametrize(
    ("log", "seconds", "steps", "tokens"),
    [
        ([Step(3, 0), Step(5, 0)], None, 2, None),
        ([Step(3, 0, tokens=8), Step(4, 0, tokens=8), Step(5, 0)], None, 2, None),
        ([Step(3, 0, time=100.0), Step(4, 0, time=101.0, tokens=8), Step(4, 1, time=103.0, tokens=9)], 3.0, 1, 17),
        ([Step(4, 0, time=90.0, tokens=8)], 40.0, 1, 8),
        ([Step(2, 0), Step(3, 0)], 0.0, 0, 0),
    ],
)
def test_what_the_log_does_not_tell_is_not_known_and_not_zero(log, seconds, steps, tokens):
    lost = lose_from_log(log, 3, 50.0, 1)
    assert (lost.rpo_seconds, lost.rpo_steps, lost.rpo_tokens) == (seconds, steps, tokens)


def test_a_restore_that_failed_took_no_time_to_recover():
    assert Numbers().rto_seconds is None


def _drilled(ranks: int) -> Drilled:
    facts = StateFacts("dcp", "", 3, {}, {}, (), {}, (), tuple(map(str, range(ranks))), 1)
    return Drilled(Save("step-3", "", 3, "", "", 0.0, 0, ()), facts, (), None, 0, 0.0)


@pytest.mark.parametrize(
    ("files", "logged", "ranks"),
    [
        (2, [(3, 0), (4, 0)], 2),  # only rank 0 logs
        (2, [(3, 0), (3, 1), (3, 2), (3, 3)], 4),  # replicas write no file
        (2, [(1, 7), (2, 7), (3, 0), (3, 1)], 2),  # the run had eight before
        (0, [], 1),
        (4, [], 4),
    ],
)
def test_ranks_are_those_of_the_save(files, logged, ranks):
    assert count_ranks(_drilled(files), [Step(step, rank) for step, rank in logged]) == ranks


_TRAINERS = {
    "mine.py": "def build(): ...\nraise SystemExit('imported')\n",
    "lazy.py": "def __getattr__(name): ...\n",
    "starred.py": "from mine import *\n",
    "chosen.py": "if True:\n    from mine import build\nelse:\n    build = None\n",
    "inner.py": "def outer():\n    def build(): ...\n",
    "broken.py": "def build(:\n",
    "kit/__init__.py": "raise SystemExit('imported')\n",
    "kit/steps.py": "build = 1\n",
}


@pytest.fixture
def trainers(tmp_path, monkeypatch) -> Path:
    for name, text in _TRAINERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("spec", ["mine:build", "lazy:build", "starred:build", "chosen:build", "kit.steps:build", "json:loads"])
def test_a_trainer_is_found_without_being_imported(trainers, spec):
    refuse_unfound(spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("other:build", "no module named 'other'"),
        ("__main__:build", "no module named '__main__'"),
        ("kit.none:build", "no module named 'kit.none'"),
        ("mine:builder", "mine.py defines no 'builder'"),
        ("inner:build", "inner.py defines no 'build'"),
        ("broken:build", "broken.py is not Python"),
    ],
)
def test_a_trainer_that_is_nowhere_is_refused_before_anything_is_read(trainers, spec, said):
    with pytest.raises(RequestError, match=said):
        refuse_unfound(spec)


@pytest.mark.parametrize("asked", [{"resume": "json:loads", "world": 9}, {"world": 2}])
def test_ranks_that_nothing_would_use_are_refused(asked, tmp_path):
    with pytest.raises(ValidationError, match="--world"):
        DrillRequest(root=tmp_path, **asked)


def test_tokens_of_some_ranks_only_are_not_those_of_the_run():
    log = [Step(4, 0, tokens=8, time=60.0)]
    assert lose_from_log(log, 3, 50.0, 1).rpo_tokens == 8
    assert lose_from_log(log, 3, 50.0, 2).rpo_tokens is None
