"""The report: one run's results as plain, frozen values.

Vocabulary. A *finding* is one thing that is wrong (or odd), with a stable code from `reports.codes`. A *result* is what one check said.
A *report* is everything one run said; JSON is its only stored form, and every rendering is made from it. A *verdict* is the line drawn
under it.

JSON: schema name in `Report.schema`; NaN and infinities are the strings "NaN", "Infinity", "-Infinity".
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from reports.moment import Moment

SCHEMA = "shardwright.report/1"
WITNESSED = frozenset({"values", "logits"})  # checks that hold a release against witnesses

OF_RUNS = frozenset({"drill", "retain", "ledger"})  # kinds of report on a training run

Severity = Literal["error", "warning", "waived"]
Status = Literal["passed", "failed", "errored", "skipped"]
Measure = float | int | str | bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a check found.

    `where` is a tensor name, file name or field; `expected` and `found` are short texts; `remedy` says what to do.
    `count` is how many alike were folded into this one. `waived` names the waiver of a `waived` finding, which was an error.
    """

    code: str
    severity: Severity
    where: str
    expected: str
    found: str
    remedy: str
    count: int = 1
    waived: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check said.

    `examined` counts what it looked at; `reason` explains `skipped` and `errored`. `attachments` are JSON texts by file name, such as a
    library's own result; they are written beside the report.
    """

    check: str
    status: Status
    findings: tuple[Finding, ...] = ()
    examined: int = 0
    measured: Mapping[str, Measure] = field(default_factory=dict)
    limits: Mapping[str, Measure] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    attachments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Witness:
    """An independent source of truth: `heard` or not (then `detail` says why), and what it proves: "bytes", "mapping" or both."""

    name: str
    heard: bool
    proves: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """Two forward passes held against each other.

    `metrics` and `limits` share their keys (mean_kl, p95_kl, cosine, top1 …; KL in nats); what has no limit is reported only.
    `kl_by_position` is the mean KL per sequence position over all rows.
    """

    name: Literal["mapping", "cast"]
    reference: str
    candidate: str
    limits_row: str
    positions: int
    metrics: Mapping[str, float]
    limits: Mapping[str, float]
    kl_by_position: tuple[float, ...] = ()
    first_diverging_layer: str = ""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """One released tensor, as re-read from disk. `shape` is `d0xd1`; `relative_error` is NaN where nothing was compared."""

    name: str
    file: str
    dtype: str
    shape: str
    nbytes: int
    absmax: float
    rms: float
    mean: float
    nonfinite: int
    zero_share: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """One quantized weight: its encoding, the bytes of all its parts and of what it was made from, and its error against the source:
    rms(dequantized - source) / rms(source), NaN where it was not compared.
    """

    name: str
    encoding: str
    nbytes: int
    source_nbytes: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Where time and bytes went: one step of the line."""

    name: str
    seconds: float
    nbytes_read: int = 0
    nbytes_written: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One field of a copied file that was set to what was written."""

    where: str
    before: str
    after: str
    because: str


@dataclass(frozen=True, slots=True)
class Omission:
    """One thing left out, and why. `asked_by` is "rule" (a family's), "request" (--drop, --skip) or "format" (training state)."""

    what: str
    because: str
    asked_by: Literal["rule", "request", "format"]


@dataclass(frozen=True, slots=True)
class Waiver:
    """An owner's word that errors of a check, or of one code, may stand until a day.

    `subject` is the check or the code, `where` a pattern of places ("*" for all), `expires` the last day it holds (ISO 8601), `place`
    where it is written ("policy.yaml:12"). `findings` counts what it let pass.
    """

    subject: str
    where: str
    owner: str
    reason: str
    expires: str
    place: str
    findings: int = 0


@dataclass(frozen=True, slots=True)
class PastRun:
    """One drill of the same training run, this one or an earlier one. `finished` is ISO 8601; `step` is None where no save was
    complete, seconds where they are not known.
    """

    run_id: str
    finished: str
    level: str
    step: int | None
    green: bool
    rto_seconds: float | None
    rpo_seconds: float | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Something of a run on its timeline, from step `first` to step `last`. `lane` names its row."""

    lane: str
    first: int
    last: int
    label: str


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one save of a run, and why; `nbytes` are all it takes now."""

    save: str
    nbytes: int
    becomes: str
    because: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`green` or not, and the one line that says it."""

    green: bool
    line: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run said.

    `kind` is the flow ("export", "gate", "drill"); `subject` the release or checkpoint judged; `action` what a green run has done
    ("published"). `started` and `finished` are ISO 8601 in UTC. `moment` is where in its run the checkpoint was made,
    `checkpoint` the real path of its folder, "" where none was read; `source` says it for people.
    """

    run_id: str
    kind: str
    action: str
    subject: str
    source: str
    plan_digest: str
    results: tuple[CheckResult, ...]
    witnesses: tuple[Witness, ...]
    environment: Mapping[str, str]
    started: str
    finished: str
    logits: tuple[LogitsComparison, ...] = ()
    tensors: tuple[TensorStatistics, ...] = ()
    phases: tuple[Phase, ...] = ()
    changes: tuple[Change, ...] = ()
    omissions: tuple[Omission, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    notes: tuple[str, ...] = ()
    history: tuple[PastRun, ...] = ()
    timeline: tuple[Mark, ...] = ()
    fates: tuple[Fate, ...] = ()
    encoded: tuple[EncodedWeight, ...] = ()
    moment: Moment = field(default_factory=Moment)
    checkpoint: str = ""
    schema: str = SCHEMA

    @property
    def has_mapping(self) -> bool:
        """Whether the run is about names that were mapped; a look at a training run is not."""
        return self.kind not in OF_RUNS

    def mapping_line(self) -> str:
        """Return `mapping proven by: …` or `mapping not proven`.

        Returns:
            One line.
        """
        names = self.mapping_witnesses()
        return f"mapping proven by: {', '.join(names)}" if names else "mapping not proven"

    def mapping_witnesses(self) -> list[str]:
        """Return the witnesses that prove the mapping.

        One that was heard proves something only when the checks that hold the release against it have passed, and needed no waiver.

        Returns:
            Their names, in the order heard.
        """
        is_contradicted = any(r.check in WITNESSED and (r.status in ("failed", "errored") or _is_waived(r)) for r in self.results)
        return [] if is_contradicted else [w.name for w in self.witnesses if w.heard and "mapping" in w.proves]

    def verdict(self, required: frozenset[str] = frozenset()) -> Verdict:
        """Return the verdict: green when no check failed or errored, and none that is `required` was skipped.

        Args:
            required: names of checks that must not be skipped.

        Returns:
            Green or not, with one line that names the failed checks' codes, or the checks skipped and why, and the waivers used.
        """
        failed = [r for r in self.results if r.status == "failed"]
        errored = [r for r in self.results if r.status == "errored"]
        skipped = [r for r in self.results if r.status == "skipped"]
        lacking = [r for r in skipped if r.check in required] + [
            CheckResult(name, "skipped", reason="not run") for name in sorted(required - {r.check for r in self.results})
        ]
        hollow = [r for r in self.results if r.status == "passed" and r.examined == 0]
        if not self.results or failed or errored or lacking or hollow:
            parts = [f"{r.check} ({', '.join(_error_codes(r))})" for r in failed]
            parts += [f"{r.check} (could not run: {r.reason})" for r in errored]
            parts += [f"{r.check} (required, but skipped: {r.reason})" for r in lacking]
            parts += [f"{r.check} (examined nothing)" for r in hollow]
            return Verdict(False, f"not {self.action}: {'; '.join([*parts, *self._waived()]) or 'no check ran'}")
        parts = [self.action]
        if skipped:
            parts.append(f"{_count(len(skipped), 'check')} skipped: " + ", ".join(f"{r.check} ({r.reason})" for r in skipped))
        return Verdict(True, ", ".join([*parts, *self._waived()]))

    def _waived(self) -> list[str]:
        used = [w for w in self.waivers if w.findings]
        named = ", ".join(f"{w.subject} ({w.owner} until {w.expires})" for w in used)
        return [f"{_count(sum(w.findings for w in used), 'finding')} waived: {named}"] if used else []


def _error_codes(result: CheckResult) -> list[str]:
    return sorted({f.code for f in result.findings if f.severity == "error"})


def _is_waived(result: CheckResult) -> bool:
    return any(f.severity == "waived" for f in result.findings)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def path_of(source: str) -> str:
    """Return the path that a report's source names, without the remark behind it, if there is one.

    Args:
        source: such as "/runs/step-3 (newest complete save)".

    Returns:
        The path.
    """
    return source.rpartition(" (")[0] if source.endswith(")") else source


_ADAPTER = TypeAdapter(Report)


def report_to_json(report: Report) -> str:
    """Return the report as indented JSON, its stored form; NaN and infinities are strings, lone surrogates are spelled (`\\udc80`).

    Args:
        report: any report.

    Returns:
        JSON text.
    """
    return json.dumps(_spell_unstorable(_ADAPTER.dump_python(report)), indent=1, allow_nan=False)


def report_from_json(text: str) -> Report:
    """Return the report stored as `text`.

    Args:
        text: what `report_to_json` wrote.

    Returns:
        The report.

    Raises:
        ValueError: the text is not a report of this schema.
    """
    report = _ADAPTER.validate_json(text)
    if report.schema != SCHEMA:
        raise ValueError(f"report schema {report.schema!r}, this version reads {SCHEMA!r}")
    return report


def report_schema() -> Mapping[str, object]:
    """Return what a stored report looks like.

    Returns:
        JSON Schema.
    """
    return _ADAPTER.json_schema()


def _spell_unstorable(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):  # a file name that is not UTF-8; strict JSON readers refuse what it would become
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_spell_unstorable(key): _spell_unstorable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell_unstorable(item) for item in value]
    return value
