"""The training log and the goals as their owners leave them: half-written, mistyped, without limit."""

from pathlib import Path

import pytest

from reports.errors import RequestError
from validators.drills.log import read_goals, read_log
from validators.retention.training_log import read_training_log

WHOLE = '{"step": 7, "rank": 0, "loss": 2.5}\n'


@pytest.mark.parametrize("tail", ["{", '{"step": 8, "rank"', '{"step": 8, "rank": 0, "loss": 2.'])
def test_a_line_that_the_trainer_is_still_writing_is_no_step_yet(tmp_path: Path, tail: str) -> None:
    (tmp_path / "train.jsonl").write_text(WHOLE + tail)
    assert [step.step for step in read_log(tmp_path / "train.jsonl")] == [7]
    assert [line.step for line in read_training_log(tmp_path / "train.jsonl")] == [7]


def test_a_last_line_counts_without_its_end_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(WHOLE + '{"step": 8, "rank": 0}')
    assert [step.step for step in read_log(tmp_path / "train.jsonl")] == [7, 8]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"step": 8, "rank"\n' + WHOLE, "line 1 is no JSON"),
        ("step,loss", "line 1 is no JSON"),
        ('{"loss": 1}\n', "line 1 is no step: step: "),
        ('{"step": 1, "rank": 0, "lr": 3}\n', "line 1 is no step: lr: "),
        ('{"step": 1e30, "rank": 0}\n', "line 1 is no step: step: "),
        ('{"step": -5, "rank": 0}\n', "count from 0"),
        ("[1, 2]\n", "line 1 is no step: "),
    ],
)
def test_a_log_that_is_none_is_refused_with_the_field_at_fault(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(RequestError, match=told) as refusal:
        read_log(tmp_path / "train.jsonl")
    assert "docs/drills.md" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rto_seconds: .nan", "rto_seconds is nan"),
        ("rpo_seconds: .inf", "rpo_seconds is inf"),
        ("mtbf_seconds: -3", "mtbf_seconds is -3"),
        ("rpo_steps: -1", "rpo_steps is -1"),
        ("declared: {budget_nbytes: -1}", "declared.budget_nbytes is -1"),
        ("declared: {keep: many}", "declared.keep: "),
        ("declared: {kept: 3}", "no goal 'declared.kept'.* There are declared.budget_nbytes, "),
        ("1: 2", "no goal '1'"),
    ],
)
def test_a_goal_that_could_never_be_missed_or_met_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "goals.yaml").write_text(text)
    with pytest.raises(RequestError, match=told):
        read_goals(tmp_path / "goals.yaml")
