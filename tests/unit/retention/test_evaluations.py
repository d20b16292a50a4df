"""The step of a result is the one it says, else the one its model's path tells, else its own path."""

import json

import pytest

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
    assert read_evaluations([tmp_path]) == ()
