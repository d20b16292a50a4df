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
        ({"config": {"model": "hf", "model_args": "pretrained=/r/step-9,peft=/r/checkpoint-31,dtype=bfloat16"}}, "a.json", 31),
        ({"config": {"model_args": {"pretrained": "/r/base", "dtype": "bfloat16"}}, "model_name": "/r/step-5"}, "a.json", 5),
        ({"config": {"model_args": "model=/r/step-8,base_url=http://localhost"}, "model_name": "/r/step-8"}, "a.json", 8),
        ({"config": {"model_args": None}, "model_name": None}, "a.json", None),
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


@pytest.mark.parametrize("args", ["pretrained=/x/step-300,dtype=bfloat16", {"pretrained": "/x/step-300", "dtype": "bfloat16"}])
def test_a_folder_as_lm_eval_leaves_it_is_read(tmp_path, args):
    # As lm-eval 0.4.9 writes it with --log_samples, one folder per model; a metric without an error has "N/A" there.
    task = {"alias": "arc_easy", "acc,none": 0.41, "acc_stderr,none": 0.01, "acc_norm,none": 0.4, "acc_norm_stderr,none": "N/A"}
    held = {
        "results": {"arc_easy": task},
        "group_subtasks": {"arc_easy": []},
        "configs": {"arc_easy": {"task": "arc_easy", "num_fewshot": 0}},
        "versions": {"arc_easy": 1.0},
        "n-shot": {"arc_easy": 0},
        "higher_is_better": {"arc_easy": {"acc": True}},
        "n-samples": {"arc_easy": {"original": 2376, "effective": 2376}},
        "config": {"model": "hf", "model_args": args, "batch_size": "8", "limit": None, "random_seed": 0},
        "git_hash": None,
        "date": 1767312000.0,
        "max_length": 2048,
        "model_source": "hf",
        "model_name": "/x/step-300",
        "model_name_sanitized": "__x__step-300",
        "total_evaluation_time_seconds": "61.2",
    }
    folder = tmp_path / "__x__step-300"
    folder.mkdir()
    (folder / "results_2026-01-02T03-04-05.678901.json").write_text(json.dumps(held))
    (folder / "samples_arc_easy_2026-01-02T03-04-05.678901.jsonl").write_text('{"doc_id": 0, "acc": 1.0}\n')
    (one,) = read_evaluations([tmp_path])
    assert (one.step, one.tokens, one.data) == (300, 0, "")
    assert one.results == {"arc_easy/acc,none": 0.41, "arc_easy/acc_stderr,none": 0.01, "arc_easy/acc_norm,none": 0.4}


def test_a_folder_of_samples_alone_holds_no_results(tmp_path):
    (tmp_path / "samples_arc_easy_2026-01-02T03-04-05.678901.jsonl").write_text('{"doc_id": 0, "results": {"acc": 1.0}}\n')
    assert read_evaluations([tmp_path]) == ()
