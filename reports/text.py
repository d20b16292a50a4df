"""The report in a few lines of plain text, for a terminal or a log: what was read, what the checks found, the verdict."""

from collections.abc import Iterator

from reports.encoded import sum_encodings
from reports.errors import name_some
from reports.model import CheckResult, Finding, LogitsComparison, Report, Severity
from reports.spell import format_bytes

_MOST = 5  # findings of one code that are told one by one


def summary_lines(report: Report, required: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the report in lines; the verdict is the last.

    Args:
        report: any report.
        required: checks that must not be skipped.

    Returns:
        Lines without their ends.
    """
    verdict = report.verdict(required)
    counts = {status: sum(r.status == status for r in report.results) for status in ("passed", "failed", "errored", "skipped")}
    return (
        f"source   {report.source}",
        "checks   " + ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        *(
            f"stored   {size.name}: {size.weights} weights, {format_bytes(size.nbytes)} from {format_bytes(size.source_nbytes)},"
            f" largest error {size.worst:.3g}"
            for size in sum_encodings(report.encoded)
        ),
        *(f"logits   {_describe(comparison)}" for comparison in report.logits),
        *(line for result in report.results for line in _finding_lines(result)),
        *(f"left out {name_some(names)}: {reason}" for reason, names in _asked_to_leave_out(report).items()),
        *(f"note     {note}" for note in report.notes),
        *([report.mapping_line()] if report.has_mapping else []),
        f"{verdict.line}: {report.subject}" if verdict.green else verdict.line,
    )


def _finding_lines(result: CheckResult) -> Iterator[str]:
    # A mistake of the config is found once per tensor: of one code and severity the first few are told, then how many more.
    told: dict[tuple[str, Severity], list[Finding]] = {}
    for finding in result.findings:
        told.setdefault((finding.code, finding.severity), []).append(finding)
    for (code, severity), findings in told.items():
        for finding in findings[:_MOST]:
            yield from _lines_of(finding)
        if len(findings) > _MOST:
            yield f"{severity:<8} … and {len(findings) - _MOST} more: [{code}] see the report"


def _lines_of(finding: Finding) -> Iterator[str]:
    more = f" ({finding.count} times)" if finding.count > 1 else ""
    told = [f"expected {finding.expected}"] * bool(finding.expected) + [f"found {finding.found}"] * bool(finding.found)
    yield f"{finding.severity:<8} {finding.where}: [{finding.code}] {', '.join(told)}{more}"
    if finding.severity == "error":
        yield f"         {finding.remedy}"
    elif finding.waived:
        yield f"         by {finding.waived}"


def _asked_to_leave_out(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for omission in report.omissions:
        if omission.asked_by == "request":
            found.setdefault(omission.because, []).append(omission.what)
    return found


def _describe(comparison: LogitsComparison) -> str:
    kl, limit = comparison.metrics.get("mean_kl"), comparison.limits.get("mean_kl")
    numbers = "" if kl is None else f": mean KL {kl:.3g}" + ("" if limit is None else f", limit {limit:.3g}")
    return f"{comparison.name}, {comparison.candidate} against {comparison.reference}, {comparison.positions} positions{numbers}"
