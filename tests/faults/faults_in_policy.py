"""Planted faults that an owner's policy and statistics rules must catch. The policies are text, as owners write them."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from reports.model import Report
from tests.faults.faults_in_weights import DOWN, EMBEDDING, GATE, NORM, UP, assign, cast, fill_all, leave, set_at
from tests.faults.planting import Fault
from validators.expectation import Evidence
from validators.policy_file import parse_policy
from validators.review import apply_policy

TODAY = date(2026, 11, 29)
WAIVER = "waivers:\n  - {{code: finite.all-zero, owner: Ada, reason: not trained yet, expires: {expires}}}\n"


def under(text: str) -> Callable[[Report], Report]:
    """Return what holds a report against a policy, on TODAY."""
    return lambda report: apply_policy(report, parse_policy(text, Path("policy.yaml")), TODAY)


def with_rule(**rule: object) -> Callable[[Evidence], Evidence]:
    """Return what gives the evidence a suite of one rule."""
    return lambda evidence: replace(evidence, suite=json.dumps({"name": "ours", "expectations": [rule]}))


def where(column: str, value: str) -> dict[str, object]:
    """Return a condition on rows."""
    return {"row_condition": {"type": "comparison", "column": {"name": column}, "operator": "==", "parameter": value}}


NORMS_NEAR_ONE = with_rule(
    type="expect_column_values_to_be_between",
    kwargs={"column": "mean", "min_value": 0.5, "max_value": 1.5, **where("kind", "norm")},
)
TWO_LAYERS = with_rule(type="expect_table_row_count_to_be_between", kwargs={"max_value": 20})
ONE_DTYPE = with_rule(type="expect_column_values_to_be_in_set", kwargs={"column": "dtype", "value_set": ["BF16"]})
NO_ADAPTERS = with_rule(type="expect_column_values_to_not_match_regex", kwargs={"column": "name", "regex": "q_proj"}, severity="warning")

STATISTICS = (
    Fault("statistics_nan", "dense", "statistics.rule-broken", set_at(EMBEDDING, (311, 5), float("nan"))),
    Fault("statistics_bytes_of_another_dtype", "dense", "statistics.rule-broken", set_at(GATE, (1, 1), 3e33)),
    Fault("statistics_norm_doubled", "dense", "statistics.rule-broken", assign(NORM, lambda t: t * 2), amend=NORMS_NEAR_ONE),
    Fault("statistics_dtype_rule", "dense", "statistics.rule-broken", leave, amend=ONE_DTYPE),
    Fault("statistics_table_rule", "dense", "statistics.rule-broken", leave, amend=TWO_LAYERS),
    Fault("statistics_name_rule", "dense", "statistics.rule-warned", leave, amend=NO_ADAPTERS),
    Fault("statistics_norm_exploded", "dense", "statistics.rule-warned", assign(NORM, lambda t: t * 1e5)),
    Fault("statistics_weight_vanished", "dense", "statistics.rule-warned", assign(UP, lambda t: t * 1e-9)),
    Fault("statistics_nearly_all_zero", "moe", "statistics.rule-warned", set_at(EMBEDDING, slice(0, 310), 0.0)),
    Fault(
        "statistics_near_overflow", "dense", "statistics.rule-warned", cast(torch.float16), prepare=set_at(UP, (1, 1), 65000.0), dtype="F16"
    ),
    Fault("statistics_rounded_to_int4", "dense", "statistics.rule-warned", assign(DOWN, lambda t: (t * 20).round() / 20)),
)

POLICY = (
    Fault("waiver_expired", "dense", "policy.waiver-expired", leave, review=under(WAIVER.format(expires="2026-11-28"))),
    Fault(
        *("waiver_expired_for_a_fault", "dense", "policy.waiver-expired", fill_all("o_proj.weight", 0.0)),
        review=under(WAIVER.format(expires="2025-01-01")),
    ),
    Fault("waiver_unused", "dense", "policy.waiver-unused", leave, review=under(WAIVER.format(expires="2026-11-29"))),
    Fault("required_check_skipped", "dense", "policy.check-skipped", leave, review=under("required_checks: [files, logits]")),
    Fault("witness_wanted", "dense", "policy.witnesses", leave, review=under("witnesses: 1")),
)

FAULTS: tuple[Fault, ...] = (*STATISTICS, *POLICY)
