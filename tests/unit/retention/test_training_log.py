"""Each kind of log gives a line per step, with tokens that are stated, or counted while no step is missing."""

import json

import pytest

from reports.errors import RequestError
from validators.retention.training_log import read_training_log


def _lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_training_log(path)


def test_ranks_of_a_step_are_one_line(tmp_path):
    rows = [{"step": step, "rank": rank, "loss": step + rank, "tokens": 10} for rank in range(2) for step in (1, 2)]
    found = _lines(tmp_path / "log.jsonl", *rows)
    assert [(line.step, line.loss, line.consumed) for line in found] == [(1, 1.5, 20), (2, 2.5, 40)]


def test_a_step_trained_again_counts_as_logged_last(tmp_path):
    rows = [{"step": step, "loss": loss} for step, loss in ((1, 3.0), (2, 9.0), (3, 9.0), (2, 2.0), (3, 1.0))]
    assert [line.loss for line in _lines(tmp_path / "log.jsonl", *rows)] == [3.0, 2.0, 1.0]


def test_tokens_are_not_counted_across_a_gap_but_stated_ones_stand(tmp_path):
    rows = [{"step": 1, "tokens": 5}, {"step": 2, "tokens": 5}, {"step": 4, "tokens": 5}, {"step": 5, "tokens": 5, "consumed_tokens": 25}]
    assert [line.consumed for line in _lines(tmp_path / "log.jsonl", *rows)] == [5, 10, 0, 25]


def test_tokens_per_step_fill_in(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss,data\n10,2.5,a\n20,,b\n")
    found = read_training_log(tmp_path / "log.csv", tokens_per_step=100)
    assert [(line.step, line.loss, line.consumed, line.data) for line in found] == [(10, 2.5, 1000, "a"), (20, None, 2000, "b")]
    assert [line.recorded for line in found] == [0, 0]


def test_what_is_stated_and_what_is_added_up_come_before_an_estimate(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,tokens,consumed_tokens\n1,2.5,7,\n2,2.5,7,\n3,2.5,,90\n4,2.5,,\n")
    found = read_training_log(path, tokens_per_step=100)
    assert [(line.consumed, line.is_estimated) for line in found] == [(7, False), (14, False), (90, False), (400, True)]


@pytest.mark.parametrize(("first", "counted"), [({"step": 0, "tokens": 5}, [5, 15, 25]), ({"step": 0, "loss": 9.0}, [0, 10, 20])])
def test_a_log_that_begins_at_step_0_counts_its_tokens(tmp_path, first, counted):
    rows = [first, {"step": 1, "tokens": 10}, {"step": 2, "tokens": 10}]
    assert [line.consumed for line in _lines(tmp_path / "log.jsonl", *rows)] == counted


def test_a_log_that_begins_later_cannot_add_up(tmp_path):
    assert [line.consumed for line in _lines(tmp_path / "log.jsonl", {"step": 2, "tokens": 10}, {"step": 3, "tokens": 10})] == [0, 0]


def test_what_torchtitan_logs_is_read(tmp_path):
    rows = [{"step": 1, "loss_metrics/global_avg_loss": 8.1, "loss_metrics/global_max_loss": 8.3, "n_tokens_seen": 4096, "lr": 0.1}]
    (line,) = _lines(tmp_path / "log.jsonl", *rows)
    assert (line.loss, line.recorded) == (8.1, 4096)


def test_what_trainer_writes_is_read(tmp_path):
    # As transformers 5.24 writes it; evaluations and the summary at the end have no loss of a step.
    history = [
        {"epoch": 0.1, "grad_norm": 3.0, "learning_rate": 0.003, "loss": 4.68, "num_input_tokens_seen": 640, "step": 10},
        {"epoch": 0.1, "eval_loss": 4.5, "eval_runtime": 1.0, "step": 10},
        {"epoch": 0.2, "grad_norm": 3.7, "learning_rate": 0.002, "loss": 4.62, "num_input_tokens_seen": 1280, "step": 20},
        {"epoch": 0.2, "total_flos": 1.0, "train_loss": 4.65, "step": 20},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": history}))
    found = read_training_log(tmp_path / "trainer_state.json")
    assert [(line.step, line.loss, line.consumed) for line in found] == [(10, 4.68, 640), (20, 4.62, 1280)]


@pytest.mark.parametrize("text", ["\ufeffstep,loss\n1,2\n", "loss,step\n2,1\n", "step,loss,note\n1,2,\n"])
def test_csv_of_other_tools_is_read(tmp_path, text):
    (tmp_path / "log.csv").write_text(text, encoding="utf-8")
    (line,) = read_training_log(tmp_path / "log.csv")
    assert (line.step, line.loss) == (1, 2.0)


def test_other_spellings_are_read(tmp_path):
    rows = [{"iteration": 5, "lm loss": 2.5, "loss": None, "ntokens_seen": 50, "data_version": "v3", "tokens": None}]
    (line,) = _lines(tmp_path / "log.jsonl", *rows)
    assert (line.step, line.loss, line.consumed, line.data) == (5, 2.5, 50, "v3")


@pytest.mark.parametrize("row", ["[1]", '{"loss": 1}', '{"step": "x"}', '{"step": 1, "loss": "high"}', '{"step": 1e999}', "7"])
def test_a_line_that_is_no_step_is_refused_with_its_number(tmp_path, row):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n' + row + "\n")
    with pytest.raises(RequestError, match=r"log\.jsonl:2"):
        read_training_log(tmp_path / "log.jsonl")


def test_a_last_line_that_is_being_written_is_not_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo')
    assert [line.step for line in read_training_log(path)] == [1]
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}')  # whole, though nothing ends it
    assert [line.step for line in read_training_log(path)] == [1, 2]
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo\n')
    with pytest.raises(RequestError, match=r"log\.jsonl:2: is no JSON"):
        read_training_log(path)


def test_a_csv_row_that_is_being_written_is_not_read(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,tokens\n1,2.5,10\n20")  # of "200,2.5,10"
    assert [line.step for line in read_training_log(path)] == [1]
    path.write_text("step,loss,tokens\n1,2.5,10\n2,2.5,1")  # of "2,2.5,10", which nothing tells
    assert [line.step for line in read_training_log(path)] == [1]


@pytest.mark.parametrize("name", ["LOG.CSV", "log.csv"])
def test_csv_is_known_in_any_case(tmp_path, name):
    (tmp_path / name).write_text("Step, Loss\n7,2.5\n")
    (line,) = read_training_log(tmp_path / name)
    assert (line.step, line.loss) == (7, 2.5)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"step": 2.5}, "step 2.5 is no whole number"),
        ({"step": -1}, "step -1 is no whole number"),
        ({"step": True}, "step True is no number"),
        ({"step": 1, "consumed_tokens": -5}, "consumed_tokens -5"),
        ({"step": 1, "loss": "high"}, "loss 'high' is no number"),
        ({"loss": 1}, "none of step, global_step, iteration"),
    ],
)
def test_what_a_line_lacks_is_said(tmp_path, row, told):
    with pytest.raises(RequestError, match=told):
        _lines(tmp_path / "log.jsonl", row)


def test_whole_numbers_are_exact_however_they_are_spelled(tmp_path):
    huge = 2**53 + 1  # a float would round it
    rows = [{"step": 1.0, "consumed_tokens": huge}, {"step": "2", "consumed_tokens": str(huge + 2)}, {"step": 10**400}]
    assert [(line.step, line.consumed) for line in _lines(tmp_path / "log.jsonl", *rows)] == [(1, huge), (2, huge + 2), (10**400, 0)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.jsonl", ""),
        ("log.jsonl", "\n\n"),
        ("log.csv", "step,loss\n"),
        ("trainer_state.json", '{"log_history": []}'),
        ("log.jsonl", '{"st'),
    ],
)
def test_a_log_without_a_step_is_refused_for_it_would_pin_nothing(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match="holds no step"):
        read_training_log(tmp_path / name)


def test_a_log_that_is_absent_is_named_without_an_error_number(tmp_path):
    with pytest.raises(RequestError, match=r"log\.jsonl: cannot be read: No such file or directory\. Check the path"):
        read_training_log(tmp_path / "log.jsonl")


def test_a_csv_with_a_quote_that_nothing_closes_is_refused(tmp_path):
    (tmp_path / "log.csv").write_text('step,loss\n1,"2\n' + "2,2.5\n" * 50_000)
    with pytest.raises(RequestError, match="is no CSV"):
        read_training_log(tmp_path / "log.csv")
