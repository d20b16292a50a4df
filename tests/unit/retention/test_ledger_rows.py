"""Rows of the ledger: who tells the tokens of a step, what is only estimated, and which saves are of one rank."""

import pytest

from validators.retention.cadence import find_gaps
from validators.retention.evaluations import Evaluation
from validators.retention.ledger import Counted, Event, LedgerSave, Sources, judge_ledger, line_up
from validators.retention.training_log import LogLine


def _save(step, tokens=None, ranks=1):
    return LedgerSave(f"step-{step}", step, "complete", Counted(step, tokens, ranks=ranks))


def _judged(sources, tokens_per_step=0):
    rows = line_up(sources, tokens_per_step)
    return rows, [(one.code, one.where) for one in judge_ledger(rows, sources, find_gaps(sources.log))]


def test_a_counter_comes_before_an_estimate_and_is_not_held_against_it():
    # A warm-up of the batch: ten steps made 777 tokens and not a thousand.
    log = (LogLine(10, 1.0, 1000, is_estimated=True), LogLine(20, 1.0, 2000, is_estimated=True))
    rows, found = _judged(Sources((_save(10, 777), _save(20)), log), 100)
    assert ([row.tokens for row in rows], found) == ([777, 2000], [])
    assert _judged(Sources((_save(10, 777), _save(20))), 100)[0][1].tokens == 2000


def test_estimates_do_not_fall():
    log = (LogLine(10, 1.0, 5000), LogLine(20, 1.0, 2000, is_estimated=True), LogLine(30, 1.0, 6000))
    assert _judged(Sources((_save(10),), log))[1] == []


@pytest.mark.parametrize(("counts", "falls"), [([100, 200, 300], []), ([100, 200, 200], ["step 3"]), ([100, 200, 150], ["step 3"])])
def test_tokens_that_do_not_grow_are_named(counts, falls):
    log = tuple(LogLine(step, 1.0, count) for step, count in enumerate(counts, 1))
    assert _judged(Sources((_save(1),), log))[1] == [("ledger.tokens-fall", step) for step in falls]


def test_between_logged_steps_a_save_is_logged_and_its_tokens_are_on_the_line():
    log = tuple(LogLine(step, 2.0, step * 100) for step in range(10, 1001, 10))
    rows, found = _judged(Sources(tuple(_save(step, step * 100 + 1 if step == 25 else None) for step in range(25, 1001, 25)), log))
    assert found == []
    assert [(row.step, row.tokens) for row in rows[:3]] == [(25, 2501), (50, 5000), (75, 7500)]


def test_a_step_in_a_gap_or_outside_the_log_is_not_logged():
    log = tuple(LogLine(step) for step in range(10, 1001, 10) if step not in (500, 510))
    found = _judged(Sources(tuple(map(_save, (5, 25, 490, 495, 505, 519, 520, 1000, 1005))), log))[1]
    assert found == [("ledger.log-gap", "steps 491 to 519"), *(("ledger.not-logged", f"step {step}") for step in (5, 495, 505, 519, 1005))]


# torchtitan on eight ranks, data x context parallel 4: the log sums over those, a save holds what one of them counted
LOG = tuple(LogLine(step, 2.0, step * 400) for step in range(1, 61))


def test_a_run_whose_saves_count_one_rank_agrees():
    saves = tuple(_save(step, step * 100, ranks=8) for step in (10, 20, 30))
    sources = Sources(saves, LOG, (Evaluation("e.json", 20, {}, 8000),), (Event("export", "export-1", 30, True, 3000),))
    rows, found = _judged(sources)
    assert (found, [row.tokens for row in rows]) == ([], [4000, 8000, 12_000])
    rows, found = _judged(Sources(saves, LOG[:25]))
    assert (found, rows[2].tokens) == ([("ledger.not-logged", "step 30")], 12_000)


def test_a_run_that_went_on_with_another_mesh_agrees():
    # 20 steps of 4 x 100, then 8 ranks of the loss: what a save holds is loaded by all
    log = (*LOG[:20], *(LogLine(step, 2.0, step * 800) for step in range(21, 61)))
    saves = (*(_save(step, step * 100, ranks=8) for step in (10, 20)), *(_save(step, step * 100, ranks=16) for step in (30, 40)))
    assert _judged(Sources(saves, log))[1] == []
    every_ten = tuple(line for line in log if line.step % 10 == 0)
    between = (_save(15, 1500, ranks=8), _save(35, 3500, ranks=16))
    rows, found = _judged(Sources((*saves, *between), every_ten))
    assert (found, {row.step: row.tokens for row in rows if row.step % 10}) == ([], {15: 6000, 35: 28_000})
    assert _judged(Sources((*saves, _save(70, 7000, ranks=16)), log))[0][-1].tokens is None  # of which mesh, nobody tells


@pytest.mark.parametrize("tokens", [2001, 1999, 4000, 1000, 16_000, 500])
def test_a_save_of_one_rank_that_counted_otherwise_is_named(tokens):
    saves = tuple(_save(step, tokens if step == 20 else step * 100, ranks=8) for step in (10, 20, 30, 40))
    assert _judged(Sources(saves, LOG))[1] == [("ledger.tokens-differ", "step 20: step-20")]


def test_a_counter_of_all_ranks_is_held_to_the_log_as_it_is():
    saves = tuple(_save(step, step * 100) for step in (10, 20))
    assert _judged(Sources(saves, LOG))[1] == [("ledger.tokens-differ", f"step {step}: step-{step}") for step in (10, 20)]


def test_a_count_of_one_rank_alone_is_not_told_as_the_runs():
    saves = (_save(10, 1000, ranks=8), _save(20, 2000, ranks=1))
    assert [row.tokens for row in _judged(Sources(saves))[0]] == [None, 2000]
    assert [row.tokens for row in _judged(Sources(saves[:1]), 400)[0]] == [4000]
