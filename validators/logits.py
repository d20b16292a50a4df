"""The logits of two forward passes agree within the limits of their dtypes. Judges what was compared elsewhere; runs no model.

Each comparison carries its own limits (validators.policy). A metric that is NaN or infinite fails, limited or not. Top-1 gates only from
TOP1_POSITIONS positions whose margin exceeds the noise.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from reports.codes import finding
from reports.model import Finding, LogitsComparison
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.policy import LOWER, TOP1_POSITIONS, UPPER

CODE_OF: Mapping[str, str] = MappingProxyType(
    {"mean_kl": "logits.mean-kl", "p95_kl": "logits.p95-kl", "cosine": "logits.cosine", "top1": "logits.top1"}
)

_QUANTIZED_ROWS = ("FP8", "INT8", "INT4")
_COARSE = "The model is more sensitive than the encoding's limits: take a finer one, keep some layers whole, or set the row in a policy."


def examine(evidence: Evidence) -> Outcome:
    """Hold every comparison's metrics against its limits.

    Args:
        evidence: logits comparisons.

    Returns:
        Findings, and the number of positions compared.
    """
    return judge_comparisons(evidence.logits)


def judge_comparisons(comparisons: Sequence[LogitsComparison]) -> Outcome:
    """Hold metrics against limits.

    Args:
        comparisons: each with its limits.

    Returns:
        Findings, and the number of positions compared.
    """
    findings = [found for comparison in comparisons for found in _judge(comparison)]
    measured = {_key(c, metric): value for c in comparisons for metric, value in c.metrics.items()}
    limits = {_key(c, metric): value for c in comparisons for metric, value in c.limits.items()}
    return Outcome(tuple(findings), sum(c.positions for c in comparisons), measured, limits)


def _key(comparison: LogitsComparison, metric: str) -> str:
    return f"{comparison.name} against {comparison.reference}: {metric}"


def _judge(comparison: LogitsComparison) -> Iterator[Finding]:
    what = f"{comparison.name}: {comparison.candidate} against {comparison.reference}"
    if comparison.positions == 0:
        yield finding("logits.no-positions", what, expected="at least one position", found="none")
        return
    nonfinite = {metric: value for metric, value in comparison.metrics.items() if not math.isfinite(value)}
    if nonfinite:
        values = " and ".join(sorted({str(value) for value in nonfinite.values()}))
        yield finding("logits.nonfinite", what, expected=f"numbers for {', '.join(nonfinite)}", found=values)
    if not comparison.limits:
        raise ValueError(f"{what}: no limits; take a row of validators.policy.LIMITS")
    for metric, limit in comparison.limits.items():
        value = comparison.metrics[metric]
        if metric == "top1" and comparison.metrics.get("top1_positions", 0) < TOP1_POSITIONS:
            continue  # too few positions to say anything; the metric is in the report all the same
        if _exceeds(metric, value, limit):
            sign = "at most" if metric in UPPER else "at least"
            layer = f"; first diverging layer: {comparison.first_diverging_layer}" if comparison.first_diverging_layer else ""
            expected = f"{sign} {limit:.6g} (row {comparison.limits_row})"
            found = finding(CODE_OF[metric], what, expected=expected, found=f"{value:.6g}{layer}")
            yield replace(found, remedy=_COARSE) if _is_quantized(comparison) else found


def _is_quantized(comparison: LogitsComparison) -> bool:
    # Its reference are the very weights that were quantized, so that nothing can be in another place.
    return comparison.name == "cast" and comparison.limits_row.startswith(_QUANTIZED_ROWS)


def _exceeds(metric: str, value: float, limit: float) -> bool:
    if metric in UPPER:
        return value > limit
    if metric in LOWER:
        return value < limit
    raise KeyError(f"no rule for a limit on {metric}; limits exist for {sorted(UPPER | LOWER)}")


CHECK = Check("logits", ("logits",), examine)
