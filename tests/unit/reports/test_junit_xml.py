"""The JUnit XML, read back by the standard library's parser: red exactly when the verdict is."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from reports.junit import MAX_FINDINGS, render_junit
from reports.model import CheckResult, Finding
from tests.builders.reports import GREEN, HOSTILE, RED, SCRIPT


def suite(report, required=frozenset()):
    root = ElementTree.fromstring(render_junit(report, required).encode())
    (only,) = root.findall("testsuite")
    return only


def outcome(case):
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def test_each_check_is_a_case_with_its_outcome():
    words = {"passed": "passed", "failed": "failure", "errored": "error", "skipped": "skipped"}
    for report in (GREEN, RED, HOSTILE):
        cases = suite(report).findall("testcase")
        assert [outcome(c) for c in cases[:-1]] == [words[r.status] for r in report.results]


@pytest.mark.parametrize(
    ("report", "required"),
    [
        (GREEN, frozenset()),
        (RED, frozenset()),
        (GREEN, frozenset({"tokenizer"})),
        (GREEN, frozenset({"never heard of"})),
        (replace(GREEN, results=()), frozenset()),
        (replace(GREEN, results=(CheckResult("files", "passed", examined=0),)), frozenset()),
    ],
)
def test_the_suite_fails_exactly_when_the_verdict_is_red(report, required):
    found = suite(report, required)
    verdict = report.verdict(required)
    last = found.findall("testcase")[-1]
    assert last.get("name") == "verdict"
    assert (outcome(last) == "passed") is verdict.green
    assert (int(found.get("failures")) + int(found.get("errors")) == 0) is verdict.green
    assert last.findtext("system-out") == verdict.line


def test_a_failure_names_codes_places_and_remedies():
    case = suite(RED).findall("testcase")[0]
    failure = case.find("failure")
    assert failure.get("message") == "inventory.missing, inventory.unexpected"
    assert failure.text.splitlines()[0] == (
        "error inventory.missing at model.layers.0.mlp.down_proj.weight: expected 4096x11008, found absent. "
        "Export again from a complete checkpoint."
    )
    assert len(failure.text.splitlines()) == 6


def test_a_warning_is_told_but_fails_nothing():
    case = next(c for c in suite(GREEN).findall("testcase") if c.get("name") == "statistics")
    assert outcome(case) == "passed"
    assert "warning statistics.outlier at model.layers.31.mlp.down_proj.weight" in case.findtext("system-out")


def test_skipped_and_errored_carry_their_reasons():
    cases = {c.get("name"): c for c in suite(RED).findall("testcase")}
    assert cases["tokenizer"].find("skipped").get("message") == "no tokenizer in --assets"
    assert cases["logits"].find("error").get("message") == "the forward pass ended with MemoryError at model.layers.11"


def test_properties_say_which_run_and_what_proved_the_mapping():
    properties = {p.get("name"): p.get("value") for p in suite(GREEN).iter("property")}
    assert properties["run_id"] == GREEN.run_id
    assert properties["mapping"] == "mapping proven by: recorded"
    assert properties["environment.torch"] == "2.13.0"


def test_control_characters_and_markup_are_spelled_in_xml():
    found = suite(HOSTILE)
    text = found.findall("testcase")[0].find("failure").text
    assert r"]]>\x00\x1b[31m\ud800" in text
    assert SCRIPT in text
    assert {element.tag for element in found.iter()} <= {element.tag for report in (RED, GREEN) for element in suite(report).iter()}


def test_findings_beyond_the_cap_are_counted():
    findings = tuple(Finding("a.b", "error", f"w{n}", "", "", "Fix.") for n in range(MAX_FINDINGS + 3))
    case = suite(replace(GREEN, results=(CheckResult("a", "failed", findings, 9),))).findall("testcase")[0]
    assert case.find("failure").text.splitlines()[-1] == "3 more in report.json"


def test_a_measure_that_is_nan_is_spelled():
    report = replace(GREEN, results=(CheckResult("logits", "passed", (), 1, {"mean_kl": math.nan}, {"mean_kl": 0.1, "top1": 1.0}),))
    said = suite(report).findall("testcase")[0].findtext("system-out").splitlines()
    assert said == ["examined 1 in 0 s", "mean_kl: NaN (limit 0.1)", "top1: not measured (limit 1)"]
