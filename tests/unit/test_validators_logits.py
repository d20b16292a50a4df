"""The judge of logits comparisons: bounds, NaN, and when top-1 counts."""

import pytest

from reports.model import LogitsComparison
from validators.check import run
from validators.expectation import Evidence
from validators.logits import CHECK
from validators.policy import LIMITS
from validators.release import Release

GOOD = {"mean_kl": 1e-9, "p95_kl": 1e-8, "cosine": 1.0, "top1": 1.0, "top1_positions": 500.0, "max_abs": 1e-5}


def judge(limits=None, **metrics):
    """Return what the check says of one comparison."""
    row = LIMITS["F32"] if limits is None else limits
    comparison = LogitsComparison("mapping", "recorded", "merged", "F32", 500, GOOD | metrics, row, first_diverging_layer="layer 3")
    return run(CHECK, Evidence(Release(None, ()), logits=(comparison,)), lambda: 0.0)


def test_equal_logits_pass_with_measures_beside_limits():
    result = judge()
    assert (result.status, result.examined) == ("passed", 500)
    assert result.measured["mapping against recorded: mean_kl"] == 1e-9
    assert result.limits["mapping against recorded: mean_kl"] == 1e-7


@pytest.mark.parametrize(
    ("metric", "value", "code"),
    [
        ("mean_kl", 2e-7, "logits.mean-kl"),
        ("p95_kl", 2e-6, "logits.p95-kl"),
        ("cosine", 0.99, "logits.cosine"),
        ("top1", 0.9, "logits.top1"),
        ("mean_kl", float("nan"), "logits.nonfinite"),
        ("max_abs", float("inf"), "logits.nonfinite"),
    ],
)
def test_metric_beyond_its_limit_fails_with_its_code(metric, value, code):
    result = judge(**{metric: value})
    assert (result.status, [found.code for found in result.findings]) == ("failed", [code])


def test_failure_names_both_sides_the_row_and_the_first_diverging_layer():
    (found,) = judge(mean_kl=1.0).findings
    assert found.where == "mapping: merged against recorded"
    assert found.expected == "at most 1e-07 (row F32)"
    assert "layer 3" in found.found


def test_nan_stays_visible_in_the_measures():
    assert str(judge(mean_kl=float("nan")).measured["mapping against recorded: mean_kl"]) == "nan"


@pytest.mark.parametrize(("positions", "status"), [(199.0, "passed"), (200.0, "failed")])
def test_top1_gates_only_from_enough_positions(positions, status):
    assert judge(top1=0.5, top1_positions=positions).status == status


def test_comparison_without_limits_or_with_an_unknown_one_is_errored():
    assert judge(limits={}).status == "errored"
    assert judge(limits={"max_abs": 1e-4}).status == "errored"


@pytest.mark.parametrize(
    ("name", "row", "word"),
    [("cast", "FP8", "finer"), ("cast", "INT4 MoE", "finer"), ("cast", "BF16", "--family"), ("mapping", "F32", "--family")],
)
def test_what_to_do_follows_from_what_was_compared(name, row, word):
    comparison = LogitsComparison(name, "merged values", "release", row, 500, GOOD | {"mean_kl": 9.0}, LIMITS[row])
    (found,) = run(CHECK, Evidence(Release(None, ()), logits=(comparison,)), lambda: 0.0).findings
    assert word in found.remedy
