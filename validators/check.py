"""A check: a name, what it needs, and a pure function of Evidence. Running one never raises.

A *need* is a kind of evidence. Met, the check is required and must examine something; not met, it is skipped and says why. An *outcome* is
what the function says; a *result* is the outcome with status and seconds, ready for the report.
"""

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from reports.codes import finding
from reports.model import CheckResult, Finding, Measure, Status
from validators.expectation import Evidence
from validators.release import MANIFEST_NAME, MARKER_NAME

Judgement = Finding | None  # None: judged and right
Need = Literal[
    "headers",
    "folder",
    "manifest",
    "bytes",
    "family",
    "config",
    "tokenizer",
    "plan",
    "values",
    "logits",
    "reference_config",
    "reference_tokenizer",
    "earlier",
    "gguf",
    "gguf_values",
]

T = TypeVar("T")

MAX_FINDINGS_PER_CODE = 20
MAX_REASON_LENGTH = 300  # characters of an exception's words; some libraries print whole tables
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)


@dataclass(frozen=True, slots=True)
class _NeedRow:
    is_met: Callable[[Evidence], bool]
    otherwise: str  # the reason when Evidence.reasons has none


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check says. `examined` counts what it looked at; `limits` and `measured` share keys where a limit was applied."""

    findings: tuple[Finding, ...] = ()
    examined: int = 0
    measured: Mapping[str, Measure] = field(default_factory=dict)
    limits: Mapping[str, Measure] = field(default_factory=dict)
    attachments: Mapping[str, str] = field(default_factory=dict)  # JSON text by file name, written beside the report


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be true of a release. `name` is its file's name."""

    name: str
    needs: tuple[Need, ...]
    examine: Callable[[Evidence], Outcome]


def has_tokenizer(folder: Path | None) -> bool:
    """Return whether a folder holds a tokenizer in any known form.

    Args:
        folder: of config and tokenizer, or None.

    Returns:
        Whether one of TOKENIZER_FILES is there.
    """
    return folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES)


def lacks_config(evidence: Evidence) -> bool:
    """Return whether a finished folder of weights has no config.json, and nobody meant it so.

    Args:
        evidence: of a release.

    Returns:
        False for one that an export wrote under the checkpoint's own names, as it was asked to (--family none), and for a config that
        cannot be parsed, which is reported as such.
    """
    release = evidence.release
    if release.config or release.folder is None or evidence.in_stage or not release.files:
        return False
    return release.manifest.get("family") != "none" and all(bad.file != "config.json" for bad in release.malformed)


NEEDS: Mapping[Need, _NeedRow] = MappingProxyType(
    {
        "headers": _NeedRow(lambda evidence: True, ""),
        "folder": _NeedRow(lambda evidence: evidence.release.folder is not None, "only planned"),
        "manifest": _NeedRow(
            lambda evidence: evidence.release.folder is not None and not {MANIFEST_NAME, MARKER_NAME}.isdisjoint(evidence.release.others),
            "not made by `shardwright export`",
        ),
        "bytes": _NeedRow(lambda evidence: evidence.release.folder is not None and evidence.tensors is not None, "no tensor measured"),
        "family": _NeedRow(lambda evidence: evidence.expected is not None, "no family"),
        "config": _NeedRow(lambda evidence: bool(evidence.release.config) or lacks_config(evidence), "no config"),
        "tokenizer": _NeedRow(lambda evidence: has_tokenizer(evidence.release.assets), "none given"),
        "plan": _NeedRow(lambda evidence: evidence.plan is not None, "no plan"),
        "values": _NeedRow(lambda evidence: evidence.values is not None, "no second reading of the source"),
        "logits": _NeedRow(lambda evidence: bool(evidence.logits), "no logits compared"),
        "reference_config": _NeedRow(lambda evidence: evidence.reference is not None and bool(evidence.reference.config), "no reference"),
        "reference_tokenizer": _NeedRow(
            lambda evidence: evidence.reference is not None and has_tokenizer(evidence.reference.folder), "no reference"
        ),
        "gguf": _NeedRow(lambda evidence: bool(evidence.release.ggufs), "no GGUF file"),
        "gguf_values": _NeedRow(lambda evidence: evidence.gguf is not None, "no second reading of the source"),
        "earlier": _NeedRow(
            lambda evidence: evidence.reference is not None and evidence.reference.tensors is not None, "no earlier release"
        ),
    }
)


def run(check: Check, evidence: Evidence, clock: Callable[[], float]) -> CheckResult:
    """Run one check. What goes wrong inside it becomes the status `errored`: a check that could not judge has not passed.

    Args:
        check: any check.
        evidence: what is known of the release.
        clock: seconds, as `time.perf_counter` counts them.

    Returns:
        `skipped` with the reason when a need is not met; `errored` when the check raised; `failed` when it found an error; else `passed`.
    """
    for need in check.needs:
        if not NEEDS[need].is_met(evidence):
            return CheckResult(check.name, "skipped", reason=evidence.reasons.get(need, NEEDS[need].otherwise))
    started = clock()
    outcome = attempt(lambda: check.examine(evidence))
    if isinstance(outcome, Exception):
        return CheckResult(check.name, "errored", seconds=clock() - started, reason=describe_error(outcome))
    return conclude(check.name, outcome, clock() - started)


def conclude(name: str, outcome: Outcome, seconds: float) -> CheckResult:
    """Return what an outcome means.

    Args:
        name: the check's.
        outcome: what it said.
        seconds: how long it took.

    Returns:
        `failed` when an error was found, else `passed`.
    """
    findings = fold_findings(outcome.findings)
    status: Status = "failed" if any(found.severity == "error" for found in findings) else "passed"
    measured, limits = outcome.measured, outcome.limits
    return CheckResult(name, status, findings, outcome.examined, measured, limits, seconds, attachments=outcome.attachments)


def attempt(call: Callable[[], T]) -> T | Exception:
    """Call something that is judged by whether it raises: a check, or a library's loader given files we do not trust.

    Args:
        call: takes nothing.

    Returns:
        What it returned, or the exception it raised.
    """
    try:
        return call()
    except Exception as error:  # the only one of the product: here a crash is a result
        return error


def first_line(said: object) -> str:
    """Return how an error or a text begins: libraries answer with paragraphs.

    Args:
        said: an exception or anything printable.

    Returns:
        Its first line, at most MAX_REASON_LENGTH characters.
    """
    return next(iter(str(said).strip().splitlines()), type(said).__name__)[:MAX_REASON_LENGTH]


def judge(code: str, where: str, *, right: bool, expected: str, found: str) -> Judgement:
    """Return one judgement, so that a check can count what it judged.

    Args:
        code: a key of CODES, for when it is wrong.
        where: tensor, file or field.
        right: whether what was found is as it must be.
        expected: what should have been there.
        found: what was.

    Returns:
        None when right, else the finding.
    """
    return None if right else finding(code, where, expected=expected, found=found)


def fold_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings without duplicates, at most MAX_FINDINGS_PER_CODE of a code, errors first.

    Args:
        findings: in the order found.

    Returns:
        Of each code the first ones; a duplicate raises the `count` of the one it repeats, and those beyond the cap are counted in the last.
    """
    unique: dict[Finding, int] = defaultdict(int)
    for found in findings:
        unique[replace(found, count=1)] += found.count
    by_code: dict[str, list[Finding]] = defaultdict(list)
    for found, count in unique.items():
        kept = by_code[found.code]
        if len(kept) < MAX_FINDINGS_PER_CODE:
            kept.append(replace(found, count=count))
        else:
            kept[-1] = replace(kept[-1], count=kept[-1].count + count)
    folded = [found for kept in by_code.values() for found in kept]
    return tuple(sorted(folded, key=lambda found: found.severity != "error"))


def describe_error(error: Exception) -> str:
    """Return what a check's exception says, for a report that has no traceback.

    Args:
        error: what it raised.

    Returns:
        Type, the last frame's place, and the first words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    words = str(error)
    return f"{type(error).__name__} at {place}: {words[:MAX_REASON_LENGTH]}{'…' if len(words) > MAX_REASON_LENGTH else ''}"
