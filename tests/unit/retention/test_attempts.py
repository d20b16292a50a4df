"""A run that goes back logs again: what it gave up is no longer of the run; what only adds to a step takes nothing away."""

import json

import pytest

from validators.retention.training_log import LogLine, read_training_log, tokens_at


def _read(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_training_log(path)


def _shown(log):
    return [(line.step, line.loss, line.consumed) for line in log]


@pytest.mark.parametrize(
    "beside",
    [
        {"step": 2, "eval_loss": 2.5},
        {"step": 2, "eval_loss": 2.5, "rank": 1},
        {"step": 1, "eval_loss": 2.5},
        {"step": 2, "data": "web-1"},
        {"step": 1, "data": "web-1"},
    ],
)
def test_a_line_beside_training_takes_nothing_from_its_step(tmp_path, beside):
    rows = [{"step": step, "loss": 3.0, "tokens": 10} for step in (1, 2, 3)]
    found = _read(tmp_path / "log.jsonl", *rows[:2], beside, rows[2])
    assert _shown(found) == [(1, 3.0, 10), (2, 3.0, 20), (3, 3.0, 30)]


def test_what_lightning_writes_is_read(tmp_path):
    # CSVLogger: the validation has a row of its own, at the step before
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n0,49,2.5,\n0,49,,2.7\n1,99,2.1,\n1,99,,2.6\n")
    assert _shown(read_training_log(tmp_path / "metrics.csv")) == [(49, 2.5, 0), (99, 2.1, 0)]


def test_loss_and_tokens_may_come_in_lines_of_their_own(tmp_path):
    losses = [{"step": step, "loss": 3.0 - step} for step in (1, 2, 3)]
    tokens = [{"step": step, "tokens": 10} for step in (1, 2, 3)]
    assert _shown(_read(tmp_path / "log.jsonl", *losses, *tokens)) == [(1, 2.0, 10), (2, 1.0, 20), (3, 0.0, 30)]


def test_an_evaluation_that_states_the_tokens_again_leaves_the_other_ranks(tmp_path):
    rows = [{"step": step, "rank": rank, "loss": 2.0 + rank, "consumed_tokens": 50 * step} for step in (1, 2) for rank in (0, 1)]
    found = _read(tmp_path / "log.jsonl", *rows, {"step": 2, "rank": 0, "eval_loss": 1.0, "consumed_tokens": 100})
    assert _shown(found) == [(1, 2.5, 50), (2, 2.5, 100)]


def test_a_restart_with_fewer_ranks_has_no_lines_of_the_others(tmp_path):
    before = [{"step": step, "rank": rank, "loss": 9.0, "tokens": 10} for step in (1, 2) for rank in range(4)]
    after = [{"step": 2, "rank": rank, "loss": 2.0, "tokens": 20} for rank in range(2)]
    assert _shown(_read(tmp_path / "log.jsonl", *before, *after)) == [(1, 9.0, 40), (2, 2.0, 80)]


def test_ranks_that_come_back_later_count_again(tmp_path):
    rows = [{"step": step, "rank": rank, "loss": 9.0, "tokens": 10} for step in (1, 2) for rank in range(4)]
    rows += [{"step": step, "rank": rank, "loss": 2.0, "tokens": 20} for step in (2, 3) for rank in range(2)]
    rows += [{"step": 4, "rank": rank, "loss": 1.0, "tokens": 10} for rank in range(4)]
    assert _shown(_read(tmp_path / "log.jsonl", *rows)) == [(1, 9.0, 40), (2, 2.0, 80), (3, 2.0, 120), (4, 1.0, 160)]


def test_what_lies_above_a_run_that_went_back_is_given_up(tmp_path):
    rows = [{"step": step, "loss": 3.0, "tokens": 10} for step in range(1, 51)]
    again = [{"step": step, "loss": 2.0, "tokens": 20} for step in range(31, 46)]
    found = _read(tmp_path / "log.jsonl", *rows, *again)
    assert [line.step for line in found] == list(range(1, 46))
    assert [found[place].loss for place in (29, 30, 44)] == [3.0, 2.0, 2.0]
    assert found[-1].consumed == 30 * 10 + 15 * 20


def test_a_run_that_went_back_twice_keeps_what_it_kept(tmp_path):
    steps = [(1, 9.0), (2, 9.0), (3, 9.0), (4, 9.0), (3, 5.0), (4, 5.0), (5, 5.0), (2, 1.0)]
    assert [(line.step, line.loss) for line in _read(tmp_path / "log.jsonl", *({"step": s, "loss": x} for s, x in steps))] == [
        (1, 9.0),
        (2, 1.0),
    ]


def test_a_run_that_logs_other_steps_after_it_went_back_gives_up_too(tmp_path):
    rows = [{"step": step, "loss": 9.0} for step in (10, 20, 30)] + [{"step": step, "loss": 1.0} for step in (15, 25)]
    assert [(line.step, line.loss) for line in _read(tmp_path / "log.jsonl", *rows)] == [(10, 9.0), (15, 1.0), (25, 1.0)]


def test_a_rank_that_goes_back_farther_than_the_first_counts_once(tmp_path):
    rows = [{"step": step, "rank": rank, "loss": 9.0, "tokens": 10} for step in (1, 2, 3, 4) for rank in (0, 1)]
    again = [{"step": step, "rank": rank, "loss": 1.0, "tokens": 15} for rank, step in ((0, 3), (1, 2), (0, 4), (1, 3), (1, 4))]
    assert _shown(_read(tmp_path / "log.jsonl", *rows, *again)) == [(1, 9.0, 20), (2, 5.0, 45), (3, 1.0, 75), (4, 1.0, 105)]


def test_ranks_that_begin_at_step_0_are_one_attempt(tmp_path):
    rows = [{"step": step, "rank": rank, "loss": 2.0, "tokens": 10} for step in (0, 1) for rank in range(3)]
    assert _shown(_read(tmp_path / "log.jsonl", *rows)) == [(0, 2.0, 30), (1, 2.0, 60)]


def test_a_late_line_of_a_step_does_not_hide_how_far_the_run_had_come(tmp_path):
    rows = [*({"step": step, "loss": 9.0} for step in (10, 20, 30)), {"step": 10, "tokens": 5}, {"step": 15, "loss": 1.0}]
    assert [(line.step, line.loss) for line in _read(tmp_path / "log.jsonl", *rows)] == [(10, 9.0), (15, 1.0)]


def test_ranks_that_lag_behind_one_another_are_one_attempt(tmp_path):
    # Rank 1 is two steps late, before the run went back to step 3 and after.
    def woven(first, last, loss):
        lines = [({"step": s, "rank": r, "loss": loss, "tokens": 10}, s + 2 * r) for r in (0, 1) for s in range(first, last + 1)]
        return [row for row, _ in sorted(lines, key=lambda one: one[1])]

    found = _read(tmp_path / "log.jsonl", *woven(1, 6, 9.0), *woven(3, 5, 1.0))
    assert _shown(found) == [(1, 9.0, 20), (2, 9.0, 40), (3, 1.0, 60), (4, 1.0, 80), (5, 1.0, 100)]


EVERY_TEN = tuple(LogLine(step, 2.0, step * 100) for step in range(10, 101, 10))


@pytest.mark.parametrize(("step", "tokens"), [(10, 1000), (25, 2500), (99, 9900), (100, 10_000), (5, 0), (101, 0)])
def test_tokens_between_logged_steps_lie_on_their_line(step, tokens):
    assert tokens_at(EVERY_TEN, step) == tokens


def test_tokens_in_a_gap_are_not_guessed():
    log = tuple(line for line in EVERY_TEN if line.step not in (50, 60))
    assert [tokens_at(log, step) for step in (35, 45, 55, 75)] == [3500, 0, 0, 7500]


def test_lines_between_that_count_nothing_are_passed_over():
    log = tuple(LogLine(step, 2.0, step * 100 if step % 10 == 0 else 0) for step in range(5, 101, 5))
    assert [tokens_at(log, step) for step in (15, 17, 20)] == [1500, 1700, 2000]
    assert tokens_at(tuple(LogLine(step, 2.0) for step in range(1, 50)), 20) == 0


def test_a_counter_that_fell_lies_on_no_line():
    log = (*EVERY_TEN[:5], *(LogLine(step, 2.0, step) for step in range(60, 101, 10)))
    assert tokens_at(log, 55) == 0
    assert tokens_at(log, 65) == 65
