"""A report under a policy: waivers let errors pass for their owner's reason and until their day, and nothing else."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from reports.codes import finding
from reports.model import CheckResult, LogitsComparison, Report, Waiver, Witness, report_from_json, report_to_json
from tests.builders.reports import GREEN
from validators.check import conclude, fold_findings
from validators.logits import judge_comparisons
from validators.policy import LIMITS, SMALLEST_MEAN_KL, Policy
from validators.policy_file import parse_policy
from validators.review import apply_policy

TODAY = date(2026, 11, 29)
DIGEST = finding("files.pickle", "model-00001.safetensors", expected="ab", found="cd")
HOLE = finding("files.hole", "model-00002.safetensors", expected="no gap", found="8 bytes")
WARNING = finding("finite.constant", "model.norm.weight", expected="values that vary", found="64 times 1")
WAIVER = Waiver("files.pickle", "*", "Ada", "the mirror recompresses", "2026-12-31", "policy.yaml:4")
HEARD = (Witness("recorded", True, ("mapping",)), Witness("second path", True, ("bytes",)))


def report(*results: CheckResult, **fields: object) -> Report:
    """A gate's report that found `results`."""
    return replace(GREEN, kind="gate", action="accepted", results=results, witnesses=HEARD, logits=(), **fields)


def files(*findings, status="failed") -> CheckResult:
    """A result of the check `files`."""
    return CheckResult("files", status, findings, 2)


def under(judged: Report, *waivers: Waiver, today: date = TODAY) -> Report:
    """The report under a policy of these waivers."""
    return apply_policy(judged, Policy(waivers=waivers), today)


def test_the_default_policy_leaves_verdict_and_results_as_they_are():
    for judged in (report(files(status="passed")), report(files(DIGEST))):
        reviewed = apply_policy(judged, Policy(), TODAY)
        assert reviewed.verdict() == judged.verdict()
        assert reviewed.results[:-1] == judged.results
        assert reviewed.results[-1].check == "policy"


def test_a_used_waiver_turns_the_finding_and_is_named_in_the_verdict():
    reviewed = under(report(files(DIGEST)), WAIVER)
    (waived,) = reviewed.results[0].findings
    assert (waived.severity, waived.waived) == ("waived", "Ada until 2026-12-31: the mirror recompresses (policy.yaml:4)")
    assert reviewed.results[0].status == "passed"
    assert reviewed.verdict().green
    assert reviewed.verdict().line == "accepted, 1 finding waived: files.pickle (Ada until 2026-12-31)"
    assert reviewed.waivers == (replace(WAIVER, findings=1),)


def test_a_waiver_of_a_code_leaves_the_other_codes_of_its_check():
    reviewed = under(report(files(DIGEST, HOLE)), WAIVER)
    assert reviewed.results[0].status == "failed"
    line = "not accepted: files (files.hole); 1 finding waived: files.pickle (Ada until 2026-12-31)"
    assert reviewed.verdict().line == line


def test_a_waiver_of_a_check_covers_all_its_codes():
    reviewed = under(report(files(DIGEST, HOLE)), replace(WAIVER, subject="files"))
    assert reviewed.verdict().line == "accepted, 2 findings waived: files (Ada until 2026-12-31)"


@pytest.mark.parametrize(
    ("pattern", "green"), [("model-00001*", True), ("model-0000?.safetensors", True), ("model", False), ("MODEL-*", False)]
)
def test_a_pattern_matches_whole_places(pattern, green):
    assert under(report(files(DIGEST)), replace(WAIVER, where=pattern)).verdict().green == green


@pytest.mark.parametrize(("today", "green"), [(date(2026, 12, 31), True), (date(2027, 1, 1), False)])
def test_a_waiver_holds_on_its_last_day_and_not_after(today, green):
    reviewed = under(report(files(DIGEST)), WAIVER, today=today)
    assert reviewed.verdict().green == green
    expired = [f for f in reviewed.results[-1].findings if f.code == "policy.waiver-expired"]
    assert [f.where for f in expired] == ([] if green else ["policy.yaml:4"])
    assert reviewed.results[0].findings[0].severity == ("waived" if green else "error")


def test_an_expired_waiver_fails_also_where_nothing_is_wrong():
    reviewed = under(report(files(status="passed")), WAIVER, today=date(2027, 1, 1))
    assert reviewed.verdict().line == "not accepted: policy (policy.waiver-expired)"


def test_an_unused_waiver_is_noted_and_turns_nothing():
    reviewed = under(report(files(status="passed")), WAIVER)
    assert [(f.code, f.where) for f in reviewed.results[-1].findings] == [("policy.waiver-unused", "policy.yaml:4")]
    assert reviewed.verdict() == replace(reviewed.verdict(), green=True, line="accepted")


def test_of_two_waivers_the_first_that_holds_is_used():
    old, broad = replace(WAIVER, expires="2026-01-01"), replace(WAIVER, subject="files", place="policy.yaml:9")
    reviewed = under(report(files(DIGEST)), old, broad)
    assert [w.findings for w in reviewed.waivers] == [0, 1]


def test_warnings_crashes_and_skips_are_not_waived():
    every = replace(WAIVER, subject="files")
    warned = under(report(files(WARNING, status="passed")), every)
    assert warned.results[0].findings == (WARNING,)
    crashed = under(report(CheckResult("files", "errored", reason="KeyError")), every)
    assert not crashed.verdict().green
    skipped = apply_policy(
        report(CheckResult("files", "skipped", reason="none given")), Policy(frozenset({"files"}), waivers=(every,)), TODAY
    )
    assert "policy (policy.check-skipped)" in skipped.verdict().line


def test_a_check_that_looked_at_nothing_stays_red_though_waived():
    assert not under(report(replace(files(DIGEST), examined=0)), WAIVER).verdict().green


def test_a_pattern_does_not_speak_for_findings_beyond_the_cap():
    lost = [replace(DIGEST, where=f"model-{n:05}.safetensors") for n in range(30)]
    judged = report(conclude_files(*lost))
    narrow = under(judged, replace(WAIVER, where="model-*"))
    assert [f.severity for f in narrow.results[0].findings].count("error") == 1
    assert not narrow.verdict().green
    wide = under(judged, WAIVER)
    assert wide.verdict().green
    assert wide.waivers[0].findings == 30


def conclude_files(*findings) -> CheckResult:
    """A result of the check `files`, folded."""
    return files(*fold_findings(findings))


def test_a_pattern_covers_a_finding_that_was_found_twice():
    assert under(report(conclude_files(DIGEST, DIGEST)), replace(WAIVER, where="model-*")).waivers[0].findings == 2


@pytest.mark.parametrize("check", ["values", "logits"])
def test_a_witness_that_was_contradicted_proves_nothing_though_waived(check):
    code = {"values": "values.differing", "logits": "logits.cosine"}[check]
    judged = report(CheckResult(check, "failed", (finding(code, "w"),), 1))
    reviewed = under(judged, replace(WAIVER, subject=code))
    assert reviewed.verdict().green
    assert reviewed.mapping_line() == "mapping not proven"


@pytest.mark.parametrize(("wanted", "green"), [(0, True), (1, True), (2, False)])
def test_witnesses_of_the_mapping_are_counted(wanted, green):
    policy = parse_policy(f"witnesses: {wanted}", Path("policy.yaml"))
    reviewed = apply_policy(report(files(status="passed")), policy, TODAY)
    assert reviewed.verdict().green == green
    if not green:
        (found,) = reviewed.results[-1].findings
        assert found.found == "1: recorded"
        assert "policy.yaml:1" in found.expected


@pytest.mark.parametrize("results", [(), (CheckResult("logits", "skipped", reason="no golden"),)], ids=["not_run", "skipped"])
def test_a_required_check_must_not_be_skipped(results):
    policy = parse_policy("required_checks:\n - logits\n", Path("policy.yaml"))
    reviewed = apply_policy(report(files(status="passed"), *results), policy, TODAY)
    (found,) = reviewed.results[-1].findings
    assert (found.code, found.where) == ("policy.check-skipped", "logits")
    assert "policy.yaml:2" in found.expected
    assert not reviewed.verdict().green


def comparison(name: str, mean_kl: float, **metrics: float) -> LogitsComparison:
    """A comparison under the product's limits."""
    numbers = {"mean_kl": mean_kl, "p95_kl": 1e-9, "cosine": 1.0, "top1": 1.0, "top1_positions": 300.0, **metrics}
    return LogitsComparison(name, "source", "release", "BF16", 384, numbers, LIMITS["BF16"])  # type: ignore[arg-type]


def under_limits(held: LogitsComparison, text: str) -> Report:
    """The report of one comparison under a policy."""
    judged = report(conclude("logits", judge_comparisons((held,)), 3.0))
    return apply_policy(replace(judged, logits=(held,)), parse_policy(text, Path("policy.yaml")), TODAY)


@pytest.mark.parametrize(("limit", "status"), [("4e-3", "passed"), ("2e-3", "failed")])
def test_limits_of_the_policy_replace_the_products(limit, status):
    reviewed = under_limits(comparison("mapping", 3e-3), f"limits: {{BF16: {{mean_kl: {limit}}}}}")
    assert (reviewed.results[0].status, reviewed.results[0].seconds) == (status, 3.0)
    assert reviewed.logits[0].limits["mean_kl"] == float(limit)
    assert reviewed.logits[0].limits["cosine"] == LIMITS["BF16"]["cosine"]


def test_limits_may_be_tighter():
    assert under_limits(comparison("mapping", 3e-5), "limits: {BF16: {mean_kl: 1e-5}}").results[0].status == "failed"


@pytest.mark.parametrize(("floor", "limit"), [(0.0, SMALLEST_MEAN_KL), (1e-6, 3e-6), (1.0, 0.5)])
def test_a_cast_stays_near_its_noise_floor_under_any_policy(floor, limit):
    reviewed = under_limits(comparison("cast", 1e-9, noise_floor=floor), "limits: {BF16: {mean_kl: 0.5}}")
    assert reviewed.logits[0].limits["mean_kl"] == pytest.approx(limit)


def test_limits_leave_a_comparison_that_was_not_made():
    none = replace(comparison("cast", 0.0), positions=0, metrics={}, limits={})
    reviewed = under_limits(none, "limits: {BF16: {mean_kl: 0.5}}")
    assert reviewed.logits == (none,)
    assert reviewed.results[0].status == "failed"


def test_a_reviewed_report_is_stored_whole():
    reviewed = under(report(files(DIGEST, HOLE)), WAIVER)
    assert report_from_json(report_to_json(reviewed)) == reviewed
