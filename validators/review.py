"""Hold a report against a policy: its limits, its waivers, the checks and witnesses it requires. Pure; the day is handed in.

A waiver lets errors pass, never a crash, a skip or the policy's own findings: they keep their place in the report with the severity
`waived`. It does not make a witness right: values that needed a waiver prove no mapping. What the policy finds is a result of its own,
`policy`, which is always there, so that a report says which waivers were looked at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from typing import cast

from reports.codes import finding
from reports.model import CheckResult, Finding, LogitsComparison, Report, Waiver
from validators import logits
from validators.check import MAX_FINDINGS_PER_CODE, Outcome, conclude
from validators.policy import LIMITS, LimitsRow, Policy, cast_limits

NAME = "policy"


@dataclass(frozen=True, slots=True)
class _Use:
    waiver: Waiver
    is_expired: bool


def apply_policy(report: Report, policy: Policy, today: date) -> Report:
    """Return a report as a policy sees it.

    Args:
        report: what the checks said, under the product's own limits; not yet held against a policy.
        policy: what its owner decided.
        today: the day that waivers are held against; a waiver holds on its last day.

    Returns:
        The report with the policy's limits, its waivers counted, waived errors marked and the result `policy` added.
    """
    assert all(result.check != NAME for result in report.results), "a policy is applied once"
    report = _hold_to_limits(report, policy)
    uses = [_Use(waiver, date.fromisoformat(waiver.expires) < today) for waiver in policy.waivers]
    results, counts = _waive(report.results, uses)
    waivers = tuple(replace(use.waiver, findings=count) for use, count in zip(uses, counts, strict=True))
    reviewed = replace(report, results=results, waivers=waivers)
    findings = (*_judge_waivers(uses, counts), *_judge_required(reviewed, policy), *_judge_witnesses(reviewed, policy))
    measured = {"waivers": len(waivers), "findings waived": sum(counts), "mapping witnesses": len(reviewed.mapping_witnesses())}
    # The policy itself was looked at, also one that asks for nothing.
    outcome = Outcome(findings, 1 + len(waivers) + len(policy.required), measured, {"mapping witnesses": policy.witnesses})
    return replace(reviewed, results=(*results, conclude(NAME, outcome, 0.0)))


def hold_to(comparison: LogitsComparison, policy: Policy) -> LogitsComparison:
    """Return a comparison with the limits that a policy sets.

    Args:
        comparison: any; one that was not made has no limits and gets none.
        policy: what its owner decided.

    Returns:
        The comparison. A cast's mean KL stays near the noise floor that was measured with it.
    """
    if not comparison.limits:
        return comparison
    row = cast("LimitsRow", comparison.limits_row)
    if comparison.name == "mapping":
        return replace(comparison, limits=policy.limits[row])
    return replace(comparison, limits=cast_limits(row, comparison.metrics.get("noise_floor", 0.0), policy.limits))


def _hold_to_limits(report: Report, policy: Policy) -> Report:
    if policy.limits == LIMITS:
        return report
    comparisons = tuple(hold_to(comparison, policy) for comparison in report.logits)
    results = tuple(
        conclude(result.check, logits.judge_comparisons(comparisons), result.seconds)
        if result.check == logits.CHECK.name and result.status in ("passed", "failed")
        else result
        for result in report.results
    )
    return replace(report, logits=comparisons, results=results)


def _waive(results: Sequence[CheckResult], uses: Sequence[_Use]) -> tuple[tuple[CheckResult, ...], list[int]]:
    counts = [0] * len(uses)
    waived = []
    for result in results:
        kept = []
        for found in result.findings:
            index = next((n for n, use in enumerate(uses) if _covers(use, result, found)), None)
            if index is None:
                kept.append(found)
            else:
                counts[index] += found.count
                kept.append(replace(found, severity="waived", waived=_spell(uses[index].waiver)))
        is_failed = any(found.severity == "error" for found in kept)
        status = "passed" if result.status == "failed" and not is_failed else result.status
        waived.append(replace(result, status=status, findings=tuple(kept)))
    return tuple(waived), counts


def _covers(use: _Use, result: CheckResult, found: Finding) -> bool:
    waiver = use.waiver
    if use.is_expired or found.severity != "error" or waiver.subject not in (result.check, found.code):
        return False
    return waiver.where == "*" or (fnmatchcase(found.where, waiver.where) and not _stands_for_others(result, found))


def _stands_for_others(result: CheckResult, found: Finding) -> bool:
    # The last finding of a code that filled up counts those beyond the cap, wherever they are: a pattern cannot speak for them.
    alike = [other for other in result.findings if other.code == found.code]
    return found.count > 1 and len(alike) >= MAX_FINDINGS_PER_CODE and alike[-1] is found


def _judge_waivers(uses: Sequence[_Use], counts: Sequence[int]) -> Iterator[Finding]:
    for use, count in zip(uses, counts, strict=True):
        waiver = use.waiver
        if use.is_expired:
            found = f"{waiver.subject} at {waiver.where}, waived by {waiver.owner} until {waiver.expires}"
            yield finding("policy.waiver-expired", waiver.place, expected="a waiver that still holds", found=found)
        elif not count:
            found = f"no error of {waiver.subject} at {waiver.where}"
            yield finding("policy.waiver-unused", waiver.place, expected="something to waive", found=found)


def _judge_required(report: Report, policy: Policy) -> Iterator[Finding]:
    results = {result.check: result for result in report.results}
    for check in sorted(policy.required):
        result = results.get(check)
        if result is None or result.status == "skipped":
            place = policy.places.get(check, "the policy")
            why = f"skipped: {result.reason}" if result else "not run"
            yield finding("policy.check-skipped", check, expected=f"a result; {place} requires it", found=why)


def _judge_witnesses(report: Report, policy: Policy) -> Iterator[Finding]:
    heard = report.mapping_witnesses()
    if len(heard) < policy.witnesses:
        place = policy.places.get("witnesses", "the policy")
        expected = f"{policy.witnesses} that prove the mapping; {place} wants them"
        yield finding("policy.witnesses", "witnesses", expected=expected, found=f"{len(heard)}: {', '.join(heard) or 'none'}")


def _spell(waiver: Waiver) -> str:
    return f"{waiver.owner} until {waiver.expires}: {waiver.reason} ({waiver.place})"
