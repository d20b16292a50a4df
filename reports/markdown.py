"""The report as a short Markdown text, for a pull request or a CI step summary. Details are in report.html beside it.

Names go into code spans, whose fence is longer than any run of backticks in them; other text has its punctuation escaped, so that
nothing out of a checkpoint becomes a link, an image, a heading or HTML. Source: CommonMark 0.31, 2.4 and 6.1; GFM 0.29, 4.10.
"""

import re
from collections.abc import Iterable, Sequence

from reports.model import CheckResult, Finding, Report
from reports.spell import spell_limits, spell_number, spell_seconds, spell_unseen

MAX_FINDINGS = 20
MAX_CHECKS = 60
MAX_CHARS = 200  # of one text
SEVERITIES = {"error": "❌", "warning": "⚠️", "waived": "⊘ waived"}
MARKS = {"passed": "✅ passed", "failed": "❌ failed", "errored": "❗ errored", "skipped": "⊘ skipped"}
_SPECIAL = re.compile(r"([\\`*_\[\]|~&]|:(?=//)|(?<=www)\.)")  # the last two: GFM links bare addresses
_LEADING = re.compile(r"^(\d*)([-+=#.)])")  # a list, a heading or a rule, at the start of a line only


def render_markdown(report: Report, required: frozenset[str] = frozenset()) -> str:
    """Return the report as Markdown: verdict, checks, the first findings, what was not heard.

    Args:
        report: any report.
        required: names of checks the policy does not let be skipped.

    Returns:
        A text of a few kilobytes, whatever the report holds.
    """
    verdict = report.verdict(required)
    parts = [
        f"## {'✅ green' if verdict.green else '❌ red'} · {escape_markdown(shorten(report.subject))}",
        escape_markdown(shorten(verdict.line, 1000)),
        escape_markdown(shorten(report.mapping_line())) if report.has_mapping else "",
        "\n".join(
            [
                "| check | status | examined | time | measured |",
                "|---|---|--:|--:|---|",
                *(_check_row(result) for result in report.results[:MAX_CHECKS]),
            ]
        ),
        _more(len(report.results) - MAX_CHECKS, "checks"),
        _findings([f for result in report.results for f in result.findings]),
        _waivers(report),
        _unheard(report),
        ", ".join(
            f"{name} {code_span(shorten(value))}"
            for name, value in {"source": report.source, "run": report.run_id, "plan": report.plan_digest}.items()
            if value
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_check(result: CheckResult) -> str:
    """Return one check's result as Markdown.

    Args:
        result: any result.

    Returns:
        A heading, the numbers, and the first findings.
    """
    parts = [
        f"### {escape_markdown(result.check)}: {MARKS[result.status]}",
        f"{spell_number(result.examined)} examined in {spell_seconds(result.seconds)}.",
        escape_markdown(shorten(result.reason, 1000)),
        "\n".join(f"- {line}" for line in _measures(result)[:MAX_CHECKS]),
        _findings(result.findings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def code_span(text: str, *, in_table: bool = False) -> str:
    """Return `text` as a code span that it cannot leave.

    Args:
        text: any text.
        in_table: whether it stands in a table's cell, where a bar would end the cell even in code.

    Returns:
        The span; a dash for an empty text.
    """
    shown = spell_unseen(text)
    if not shown.strip():
        return "—"
    if in_table:
        shown = shown.replace("|", r"\|")
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if "`" in shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def escape_markdown(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, on one line.

    Args:
        text: any text.

    Returns:
        Markdown source, good in a table's cell too.
    """
    return _LEADING.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", spell_unseen(text))).replace("<", "&lt;").replace(">", "&gt;")


def shorten(text: str, limit: int = MAX_CHARS) -> str:
    """Return `text` with its middle left out when it is longer than `limit`.

    Args:
        text: any text.
        limit: in characters.

    Returns:
        At most `limit` characters: both ends of a long name tell more than its start.
    """
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _check_row(result: CheckResult) -> str:
    said = "; ".join(part for part in (escape_markdown(shorten(result.reason)), *_measures(result)[:4]) if part)
    name, status = escape_markdown(shorten(result.check)), MARKS[result.status]
    return f"| {name} | {status} | {spell_number(result.examined)} | {spell_seconds(result.seconds)} | {said} |"


def _measures(result: CheckResult) -> list[str]:
    rows = spell_limits(result.measured, result.limits)
    return [
        escape_markdown(f"{shorten(name)} {shorten(value) or 'not measured'}" + (f" (limit {shorten(limit)})" if limit else ""))
        for name, value, limit in rows
    ]


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    ordered = sorted(findings, key=lambda f: f.severity != "error")
    rows = [_finding_row(finding) for finding in ordered[:MAX_FINDINGS]]
    remedies = dict.fromkeys(f"- {code_span(f.code)}: {escape_markdown(shorten(f.remedy))}" for f in ordered[:MAX_FINDINGS])
    table = ["| | code | where | expected | found |", "|---|---|---|---|---|", *rows]
    return "\n\n".join(
        part for part in ("\n".join(table), _more(len(findings) - MAX_FINDINGS, "findings"), "What to do:", "\n".join(remedies)) if part
    )


def _finding_row(finding: Finding) -> str:
    alike = f" and {finding.count - 1} alike" if finding.count > 1 else ""
    cells: Iterable[str] = (finding.where, finding.expected, finding.found)
    where, expected, found = (code_span(shorten(cell), in_table=True) for cell in cells)
    return f"| {SEVERITIES[finding.severity]} | {code_span(finding.code, in_table=True)} | {where}{alike} | {expected} | {found} |"


def _unheard(report: Report) -> str:
    unheard = [w for w in report.witnesses if not w.heard][:MAX_CHECKS]
    return "\n".join(f"- not heard: {escape_markdown(shorten(w.name))} ({escape_markdown(shorten(w.detail))})" for w in unheard)


def _waivers(report: Report) -> str:
    used = [w for w in report.waivers if w.findings][:MAX_CHECKS]
    said = [(w.subject, w.where, f"{w.owner} until {w.expires}: {shorten(w.reason)} ({w.place}; {w.findings} findings)") for w in used]
    return "\n".join(
        f"- waived {code_span(shorten(what))} at {code_span(shorten(where))} by {escape_markdown(why)}" for what, where, why in said
    )


def _more(count: int, what: str) -> str:
    return f"{count} more {what} in report.json." if count > 0 else ""
