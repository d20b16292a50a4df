"""Statistics rules are data that owners edit: run quietly and offline, refused with their line, and silent on honest models."""

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from reports.errors import RequestError
from tests.builders.measuring import measure_tensors
from tests.builders.releases import MODELS, build_release
from validators.check import MAX_FINDINGS_PER_CODE, run
from validators.expectation import Evidence
from validators.release import open_release
from validators.statistics import ATTACHMENT, CHECK, extend_table
from validators.suite import COLUMNS, DEFAULT_SUITE, RULES, read_suite
from validators.suite_run import run_suite
from validators.tables import TensorTable

BETWEEN = "expect_column_values_to_be_between"
MATRICES = {"type": "comparison", "column": {"name": "kind"}, "operator": "==", "parameter": "matrix"}
# Arguments under which each rule can be run.
ARGUMENTS = {
    **{name: {"column": "absmax", "max_value": 1} for name in RULES if name.endswith("be_between")},
    **{f"expect_column_values_to_{what}": {"column": "dtype", "value_set": ["F32"]} for what in ("be_in_set", "not_be_in_set")},
    **{f"expect_column_values_to_{what}": {"column": "name"} for what in ("be_null", "not_be_null", "be_unique")},
    **{f"expect_column_values_to_{what}": {"column": "name", "regex": "^a"} for what in ("match_regex", "not_match_regex")},
    "expect_column_value_z_scores_to_be_less_than": {"column": "rms", "threshold": 4, "double_sided": True},
    "expect_column_pair_values_a_to_be_greater_than_b": {"column_A": "absmax", "column_B": "rms", "or_equal": True},
    "expect_table_row_count_to_be_between": {"min_value": 1},
}


def table(rows: int, **columns: object) -> pd.DataFrame:
    """A TensorTable of honest matrices, with some columns set."""
    honest = {
        **{"name": [f"model.layers.{n}.mlp.up_proj.weight" for n in range(rows)], "file": "model.safetensors", "dtype": "BF16"},
        **{
            "shape": "64x64",
            "nbytes": 8192,
            "absmax": 0.5,
            "rms": 0.1,
            "mean": 0.0,
            "nonfinite": 0,
            "zero_share": 0.0,
            "sample": "",
            "repeated": "",
        },
        **{"constant": 0, "parity": "0", "relative_error": np.nan},
    }
    return TensorTable.validate(pd.DataFrame({**honest, **columns}))


def judge(tensors: pd.DataFrame, folder: Path, suite: str = ""):
    """What the check says of a table."""
    return run(CHECK, Evidence(open_release(folder), tensors=tensors, suite=suite), time.perf_counter)


def suite_of(*rules: dict) -> str:
    """A suite as an owner writes it, a rule a line."""
    return '{"name": "ours", "expectations": [\n' + ",\n".join(json.dumps(rule) for rule in rules) + "\n]}\n"


def test_every_rule_that_may_stand_in_a_suite_can_be_run(tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(suite_of(*({"type": name, "kwargs": ARGUMENTS[name]} for name in RULES)))
    assert len(run_suite(read_suite(path), extend_table(table(4))).rules) == len(RULES)


def test_the_table_has_every_column_that_a_rule_may_name():
    assert set(extend_table(table(2)).columns) == set(COLUMNS)


def test_the_shipped_suite_is_one_that_may_be_read():
    assert read_suite(DEFAULT_SUITE) == DEFAULT_SUITE.read_text(encoding="utf-8")


def test_a_suite_that_the_library_wrote_may_be_read(tmp_path):
    import great_expectations as gx

    rule = gx.expectations.ExpectColumnValuesToBeBetween(
        column="rms", max_value=2, row_condition=gx.expectations.row_conditions.Column("kind") == "matrix"
    )
    (tmp_path / "suite.json").write_text(json.dumps(gx.ExpectationSuite(name="theirs", expectations=[rule]).to_json_dict(), indent="\t"))
    read_suite(tmp_path / "suite.json")


# A rule, and words of its refusal.
REFUSED = {
    "unknown_type": ({"type": "unexpected_rows_expectation", "kwargs": {}}, "is no rule that may stand here"),
    "unknown_column": ({"type": BETWEEN, "kwargs": {"column": "abs_max", "max_value": 1}}, "no column 'abs_max'"),
    "unknown_severity": ({"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 1}, "severity": "error"}, "severity"),
    "unknown_key": ({"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 1}, "mostly": 1}, "mostly: unknown"),
    "unknown_argument": ({"type": BETWEEN, "kwargs": {"column": "rms", "max_valu": 1}}, "max_valu"),
    "no_bound": ({"type": BETWEEN, "kwargs": {"column": "rms"}}, "cannot both be None"),
    "broken_pattern": ({"type": "expect_column_values_to_match_regex", "kwargs": {"column": "name", "regex": "("}}, "cannot be run"),
    "condition_as_code": ({"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 1, "row_condition": "@exit()"}}, "run as code"),
    "condition_passed_through": (
        {
            "type": BETWEEN,
            "kwargs": {"column": "rms", "max_value": 1, "row_condition": {"type": "pass_through", "pass_through_filter": "1"}},
        },
        "row_condition",
    ),
    "condition_on_unknown_column": (
        {"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 1, "row_condition": {**MATRICES, "column": {"name": "sort"}}}},
        "no column 'sort'",
    ),
}


@pytest.mark.parametrize(("rule", "words"), REFUSED.values(), ids=REFUSED)
def test_a_rule_that_cannot_be_run_is_refused_with_its_line(rule, words, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(suite_of({"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 1}}, rule))
    with pytest.raises(RequestError) as caught:
        read_suite(path)
    assert caught.value.where == f"{path}:3"
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("text", "line"),
    [('{"name": "a",\n}', 2), ("[]", 1), ('{"name": "a", "expectations": []}', 1), ('{"name": "a",\n"name": "b"}', 2), ("[" * 50_000, 1)],
)
def test_what_is_no_suite_is_refused_with_its_line(text, line, tmp_path):
    (tmp_path / "suite.json").write_text(text)
    with pytest.raises(RequestError) as caught:
        read_suite(tmp_path / "suite.json")
    assert caught.value.where.endswith(f"suite.json:{line}")


def test_findings_name_the_tensor_the_rule_and_what_was_found(tmp_path):
    result = judge(table(3, nonfinite=[0, 2, 0]), tmp_path)
    (found,) = result.findings
    assert (result.status, result.examined) == ("failed", 3)
    assert (found.code, found.where) == ("statistics.rule-broken", "model.layers.1.mlp.up_proj.weight")
    assert (found.expected, found.found) == ("no NaN and no infinity", "nonfinite 2")


def test_a_rule_without_a_description_is_spelled(tmp_path):
    suite = suite_of({"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 0.05, "row_condition": MATRICES}, "severity": "info"})
    result = judge(table(1), tmp_path, suite)
    assert (result.status, [f.code for f in result.findings]) == ("passed", ["statistics.rule-warned"])
    assert result.findings[0].expected == f"{BETWEEN}: column rms, max_value 0.05, where kind == matrix"


@pytest.mark.parametrize(("mostly", "found"), [(0.5, 0), (0.9, 1)])
def test_a_rule_that_need_hold_for_most_only_is_not_broken_by_a_few(mostly, found, tmp_path):
    suite = suite_of({"type": BETWEEN, "kwargs": {"column": "rms", "max_value": 0.2, "mostly": mostly}})
    assert len(judge(table(3, rms=[0.1, 0.1, 0.3]), tmp_path, suite).findings) == found


def test_a_rule_of_a_column_over_no_row_has_nothing_to_judge(tmp_path):
    nothing = {**MATRICES, "parameter": "norm"}
    suite = suite_of({"type": "expect_column_max_to_be_between", "kwargs": {"column": "rms", "max_value": 1e-9, "row_condition": nothing}})
    assert judge(table(3), tmp_path, suite).findings == ()


def test_a_rule_that_cannot_be_run_on_this_table_is_no_pass(tmp_path):
    result = judge(table(3), tmp_path, suite_of({"type": BETWEEN, "kwargs": {"column": "absent", "max_value": 1}}))
    assert result.status == "errored"
    assert "1 of 1 rules cannot be run" in result.reason


def test_the_librarys_result_is_attached_short_and_without_this_machine(tmp_path):
    result = judge(table(500, nonfinite=1), tmp_path)
    said = json.loads(result.attachments[ATTACHMENT])
    assert said["statistics"]["evaluated_expectations"] == len(json.loads(DEFAULT_SUITE.read_text())["expectations"])
    assert said["results"][0]["result"]["unexpected_count"] == 500
    assert len(said["results"][0]["result"]["partial_unexpected_index_list"]) == MAX_FINDINGS_PER_CODE
    assert sum(found.count for found in result.findings) == 500
    assert "ge_load_time" not in result.attachments[ATTACHMENT]
    assert result.attachments == judge(table(500, nonfinite=1), tmp_path).attachments


def test_it_is_silent_and_offline(tmp_path, monkeypatch, capfd):
    def connect(*_):
        raise AssertionError("a connection was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    assert judge(table(3), tmp_path).status == "passed"
    assert capfd.readouterr() == ("", "")


def test_a_thousand_tensors_take_less_than_three_seconds(tmp_path):
    judge(table(3), tmp_path)
    assert judge(table(1000), tmp_path).seconds < 3


def test_the_library_is_imported_where_a_suite_is_run_only():
    code = "import sys, validators.checks, validators.policy_file; sys.exit('great_expectations' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_honest_models_pass_without_a_word(name, dtype, tmp_path):
    build_release(name, tmp_path, dtype=dtype)
    assert judge(measure_tensors(tmp_path), tmp_path).findings == ()


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("LlamaConfig", SMALL),
        ("GemmaConfig", {**SMALL, "num_key_value_heads": 1, "head_dim": 8}),  # its norms begin at zero
        ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
        ("MixtralConfig", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
        ("MambaConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    ],
)
def test_models_as_they_are_initialised_pass_without_a_word(kind, fields, tmp_path):
    transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields)).save_pretrained(tmp_path)
    assert judge(measure_tensors(tmp_path), tmp_path).findings == ()


def test_values_that_are_no_plain_floats_are_left_to_other_checks(tmp_path):
    packed = table(1, dtype="I32", absmax=2.0**31, rms=1e9)
    assert judge(packed, tmp_path).findings == ()


def test_the_evidence_of_a_policy_needs_no_suite(tmp_path):
    evidence = Evidence(open_release(tmp_path), tensors=table(2))
    assert run(CHECK, replace(evidence, suite=DEFAULT_SUITE.read_text()), lambda: 0.0) == run(CHECK, evidence, lambda: 0.0)
