"""What the summary in the terminal must not keep to itself."""

from dataclasses import replace
from pathlib import Path

from flows.terminal import print_outcome
from reports.codes import finding
from reports.model import CheckResult, EncodedWeight, Omission
from tests.builders.reports import GREEN


def shown(report, capsys):
    """The summary of a report."""
    print_outcome(report, Path("runs/one"), required=frozenset(), stage=None, as_json=False)
    return capsys.readouterr().out.splitlines()


def test_what_was_left_out_on_request_is_said_once_per_reason(capsys):
    asked = [Omission(f"model.extra.{n}", "an experiment", "request") for n in range(7)]
    lines = shown(replace(GREEN, omissions=(*asked, Omission("rope.cache", "recomputed", "rule"))), capsys)
    assert [line for line in lines if line.startswith("left out")] == [
        "left out model.extra.0, model.extra.1, model.extra.2, model.extra.3, model.extra.4, … and 2 more: an experiment"
    ]


def test_steps_passed_over_are_named(capsys):
    lines = shown(replace(GREEN, notes=("step-16 passed over: incomplete save",)), capsys)
    assert "note     step-16 passed over: incomplete save" in lines


def test_the_last_line_is_the_reports_path(capsys):
    assert shown(GREEN, capsys)[-1] == "report   runs/one/report.html"


def test_quantized_weights_are_summed_by_encoding(capsys):
    weights = (EncodedWeight("a", "int4", 1000, 4000, 0.1), EncodedWeight("b", "int4", 1000, 4000, 0.11))
    assert "stored   int4: 2 weights, 2 kB from 8 kB, largest error 0.11" in shown(replace(GREEN, encoded=weights), capsys)


def test_of_one_code_the_first_findings_are_told_and_the_others_counted(capsys):
    parts = [finding("quantized.part-missing", f"layer {n}", expected="weight_scale", found="weight") for n in range(12)]
    other = finding("quantized.nothing", "config.json", expected="quantized weights", found="none")
    result = CheckResult("quantized", "failed", (parts[0], other, *parts[1:]), examined=12)
    lines = [line for line in shown(replace(GREEN, results=(result,)), capsys) if line.startswith("error")]
    assert [line.split(": [")[0] for line in lines] == [
        *(f"error    layer {n}" for n in range(5)),
        "error    … and 7 more",
        "error    config.json",
    ]
