"""The step of a result is the one it says, else the one its model's path tells, else its own path."""

import json

import pytest

from reports.errors import RequestError
from validators.retention.evaluations import read_evaluations

RESULTS = {"arc_easy": {"alias": "arc_easy", "acc,none": 0.41, "acc_stderr,none": 0.01}}


@pytest.mark.parametrize(
    ("held", "name", "step"),
    [
        ({"step": 7, "config": {"model_args": "pretrained=/r/step-9"}}, "a.json", 7),
        ({"config": {"model_args": "pretrained=/r/step-900,dtype=float32"}}, "a.json", 900),
        ({"config": {"model_args": {"pretrained": "/r/checkpoint-31/hf"}}}, "a.json", 31),
        ({"config": {}, "model_name": "/r/iter_0000500"}, "a.json", 500),
        ({"config": {}, "model_name": "/r/release"}, "__r__global_step42/results_2026-01-02T03-04-05.json", 42),
        ({"config": {}}, "results_2026-01-02T03-04-05.json", None),
    ],
)
def test_where_the_step_is_found(tmp_path, held, name, step):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"results": RESULTS, **held}))
    (one,) = read_evaluations([path])
    assert one.step == step
    assert one.results == {"arc_easy/acc,none": 0.41, "arc_easy/acc_stderr,none": 0.01}


def test_a_json_that_has_no_results_is_passed_by(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.json").write_text(json.dumps({"step": 1000.0, "results": {"arc/acc": 0.5}}))  # as JavaScript and pandas spell 1000
    assert [one.step for one in read_evaluations([tmp_path])] == [1000]


@pytest.mark.parametrize("text", ["{}", "[1, 2]", '{"results": 3}'])
def test_a_file_that_was_named_and_holds_no_results_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert read_evaluations([tmp_path]) == ()
    with pytest.raises(RequestError, match="holds no results"):
        read_evaluations([tmp_path / "config.json"])


@pytest.mark.parametrize("step", ["-5", "2.5", "NaN", "Infinity", '"800"', "true", "[3]"])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    (tmp_path / "a.json").write_text('{"results": {"arc/acc": 0.5}, "step": ' + step + "}")
    with pytest.raises(RequestError, match="no whole number of at least 0"):
        read_evaluations([tmp_path / "a.json"])
