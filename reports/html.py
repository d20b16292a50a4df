"""The report as one page: no script, nothing fetched, every value escaped. It reads in the order of a reader in a hurry.

Long parts are capped (MAX_…) and say how much more there is; the whole is in report.json and in the run folder's CSV files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Generic, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from reports.codes import CODES
from reports.encoded import sum_encodings, worst_first
from reports.model import EncodedWeight, Fate, Finding, LogitsComparison, PastRun, Phase, Report, Severity, TensorStatistics
from reports.roles import Role, common_prefix, group_roles
from reports.spell import spell_bytes, spell_limits, spell_measure, spell_moment, spell_number, spell_seconds
from reports.svg import draw_bar, draw_positions, draw_roles, draw_sorted, draw_trend
from reports.timeline import draw_timeline

MAX_FINDINGS = 50  # of one code
MAX_CODES = 40
MAX_TENSORS = 200
MAX_ROLES = 24
MAX_WORST = 10  # quantized weights named
MAX_ROWS = 100  # of any other table

# Status → the mark beside its name, so that colour is never the only sign.
MARKS = MappingProxyType({"passed": "✓", "failed": "✗", "errored": "!", "skipped": "⊘"})
# Severity → how a page heads its findings, and the mark of one.
SEVERITIES: MappingProxyType[Severity, tuple[str, str]] = MappingProxyType(
    {"error": ("Errors", "✗ error"), "warning": ("Warnings", "! warning"), "waived": ("Waived by the policy", "⊘ waived")}
)

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Capped(Generic[Row]):
    """The first `rows` of something long. `more` counts those left out, `total` all."""

    rows: Sequence[Row]
    total: int

    @property
    def more(self) -> int:
        """How many are left out."""
        return self.total - len(self.rows)


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """The findings of one code; they share its remedy. `count` includes what a check folded into one."""

    code: str
    severity: Severity
    meaning: str
    remedy: str
    count: int
    findings: Capped[Finding]


@dataclass(frozen=True, slots=True)
class PhaseBar:
    """One phase with its share of the longest one's time and of the largest one's bytes."""

    phase: Phase
    seconds: Markup
    nbytes: Markup
    rate: str


def render_html(report: Report, required: frozenset[str] = frozenset()) -> str:
    """Return the report as a self-contained HTML page.

    Args:
        report: any report.
        required: names of checks the policy does not let be skipped.

    Returns:
        The page. It grows with the number of roles, not of tensors: under 3 MB for 10^5 of them.
    """
    roles = pick_roles(report.tensors)
    return _template().render(
        report=report,
        max_rows=MAX_ROWS,
        verdict=report.verdict(required),
        counts={mark: sum(r.status == status for r in report.results) for status, mark in MARKS.items()},
        duration=_duration(report),
        nbytes=sum(t.nbytes for t in report.tensors),
        groups={severity: (*words, group_findings(report, severity)) for severity, words in SEVERITIES.items()},
        checks=cap(report.results, MAX_ROWS),
        witnesses=cap(sorted(report.witnesses, key=lambda w: not w.heard), MAX_ROWS),
        logits=[(c, spell_limits(c.metrics, c.limits), _draw_logits(c)) for c in report.logits],
        changes=cap(report.changes, MAX_ROWS),
        omissions=cap(report.omissions, MAX_ROWS),
        waivers=cap(report.waivers, MAX_ROWS),
        encodings=sum_encodings(report.encoded),
        encoded=cap(worst_first(report.encoded), MAX_WORST),
        errors=_draw_errors(report.encoded),
        phases=bar_phases(report.phases[:MAX_ROWS]),
        charts=draw_roles(roles.rows),
        roles=roles,
        prefix=common_prefix([role.name for role in roles.rows]),
        tensors=cap(sorted(report.tensors, key=_odd_first), MAX_TENSORS),
        history=report.history[-MAX_ROWS:],
        trends=draw_trends(report.history[-MAX_ROWS:]),
        timeline=draw_timeline(report.timeline),
        fates=_group_fates(report.fates),
        environment=cap(sorted(report.environment.items()), MAX_ROWS),
    )


def cap(rows: Sequence[Row], limit: int) -> Capped[Row]:
    """Return the first rows, and how many there are.

    Args:
        rows: all of them.
        limit: how many to keep.

    Returns:
        At most `limit` rows.
    """
    return Capped(rows[:limit], len(rows))


def group_findings(report: Report, severity: Severity) -> Capped[FindingGroup]:
    """Return the findings of one severity by code, in the order the checks ran.

    Args:
        report: any report.
        severity: which.

    Returns:
        One group per code and remedy.
    """
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in (f for result in report.results for f in result.findings if f.severity == severity):
        found.setdefault((finding.code, finding.remedy), []).append(finding)
    groups = [
        FindingGroup(
            code,
            severity,
            CODES[code].meaning if code in CODES else "",  # a report of another version may know more codes
            remedy,
            sum(f.count for f in findings),
            cap(findings, MAX_FINDINGS),
        )
        for (code, remedy), findings in found.items()
    ]
    return cap(groups, MAX_CODES)


def bar_phases(phases: Sequence[Phase]) -> list[PhaseBar]:
    """Return the phases with their bars.

    Args:
        phases: in the order they ran.

    Returns:
        One bar each; the rate is of the bytes read or written, whichever are more.
    """
    longest = max((p.seconds for p in phases), default=0) or 1
    largest = max((p.nbytes_read + p.nbytes_written for p in phases), default=0) or 1
    return [
        PhaseBar(
            phase,
            draw_bar(phase.seconds / longest, "one"),
            draw_bar((phase.nbytes_read + phase.nbytes_written) / largest, "two"),
            _rate(phase),
        )
        for phase in phases
    ]


def draw_trends(history: Sequence[PastRun]) -> list[tuple[str, Markup]]:
    """Return what changed from drill to drill.

    Args:
        history: drills of one run, the newest last.

    Returns:
        Name, chart; none for a first drill.
    """
    if len(history) < 2:
        return []
    series: dict[str, list[float | None]] = {
        "recovery time, s": [past.rto_seconds for past in history],
        "work lost, s": [past.rpo_seconds for past in history],
        "bytes of the newest save": [float(past.nbytes) for past in history],
    }
    return [(name, chart) for name, values in series.items() if (chart := _draw_known(history, values, name))]


def _draw_known(history: Sequence[PastRun], values: Sequence[float | None], name: str) -> Markup:
    # What is not known has no place on the scale.
    known = [(past, value) for past, value in zip(history, values, strict=True) if value is not None]
    if len(known) < 2:
        return Markup()
    ends = (known[0][0].finished[:10], known[-1][0].finished[:10])
    return draw_trend([value for _, value in known], [past.green for past, _ in known], name, ends)


def pick_roles(tensors: Sequence[TensorStatistics]) -> Capped[Role]:
    """Return the roles worth a chart: those with several layers, broken ones first when there are too many.

    Args:
        tensors: all of the release.

    Returns:
        At most MAX_ROLES, in the release's order.
    """
    series = [role for role in group_roles(tensors) if role.is_series]
    worst = sorted(series, key=lambda role: -role.nonfinite)[:MAX_ROLES]
    kept = {role.name for role in worst}
    return Capped([role for role in series if role.name in kept], len(series))


def _rate(phase: Phase) -> str:
    nbytes = max(phase.nbytes_read, phase.nbytes_written)
    return f"{spell_bytes(nbytes / phase.seconds)}/s" if nbytes and phase.seconds > 0 else ""


def _draw_logits(comparison: LogitsComparison) -> Markup:
    if not comparison.kl_by_position:
        return Markup()
    return draw_positions(comparison.kl_by_position, comparison.limits.get("mean_kl", math.nan), comparison.name)


def _draw_errors(weights: Sequence[EncodedWeight]) -> Markup:
    compared = [weight.relative_error for weight in weights if not math.isnan(weight.relative_error)]
    return draw_sorted(compared, "relative error of quantized weights", ("largest", "smallest")) if compared else Markup()


def _group_fates(fates: Sequence[Fate]) -> dict[str, Capped[Fate]]:
    # By what becomes of a save, what is kept last: neither hides the other in a run of thousands.
    groups: dict[str, list[Fate]] = {}
    for fate in sorted(fates, key=lambda fate: fate.becomes == "kept"):
        groups.setdefault(fate.becomes, []).append(fate)
    return {becomes: cap(found, MAX_ROWS) for becomes, found in groups.items()}


def _odd_first(tensor: TensorStatistics) -> tuple[bool, int, float]:
    # Non-finite values first, then the largest error against the source; the sort is stable, so the rest stay as stored.
    error = 0.0 if math.isnan(tensor.relative_error) else tensor.relative_error
    return math.isfinite(tensor.rms) and math.isfinite(tensor.absmax), -tensor.nonfinite, -error


def _duration(report: Report) -> str:
    # Times are to the second, and read so: what began and ended within one took less.
    seconds = round((datetime.fromisoformat(report.finished) - datetime.fromisoformat(report.started)).total_seconds())
    return f"{seconds} s" if 0 < seconds < 60 else spell_seconds(seconds) if seconds else "less than 1 s"


def _spell(value: object) -> object:
    # What the template prints: text made visible, floats with NaN; markup is already safe.
    if isinstance(value, Markup):
        return value
    return spell_measure(value) if isinstance(value, (str, float)) else value


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_spell,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(limits=spell_limits)
    environment.filters.update(nbytes=spell_bytes, seconds=spell_seconds, number=spell_number, moment=spell_moment, mark=MARKS.__getitem__)
    return environment.get_template("report.html")
