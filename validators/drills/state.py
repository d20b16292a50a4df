"""D2: every tensor and object is what was recorded of it, by name and exactly."""

from collections.abc import Iterator

from reports.codes import finding
from reports.model import Finding, Measure
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import Drilled, DrillEvidence
from validators.drills.facts import Entry


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Compare what was read with what was recorded.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings; how many entries were compared and how many recorded now for the first time.
    """
    if evidence.newest is None:
        return Skip("no complete save")
    findings = [found for drilled in evidence.sound for found in _compare(drilled)]
    compared = sum(len(d.record.entries) for d in evidence.sound if d.record)
    first = [d.save.name for d in evidence.sound if d.record is None]
    examined = sum(len(d.facts.entries) for d in evidence.sound)
    measured: dict[str, Measure] = {"read": examined, "compared with a record": compared, "recorded now": ", ".join(first) or "none"}
    return Outcome(tuple(findings), examined, measured)


def _compare(drilled: Drilled) -> Iterator[Finding]:
    if drilled.record is None:
        return
    where, found, recorded = drilled.save.name, drilled.facts.entries, drilled.record.entries
    for key in recorded.keys() - found.keys():
        yield finding("state.missing", f"{where}: {key}", expected=_spell(recorded[key]), found="absent")
    for key in found.keys() - recorded.keys():
        code = "state.added" if found[key].role == "object" else "state.unexpected"
        yield finding(code, f"{where}: {key}", expected="nothing of this name", found=_spell(found[key]))
    for key in sorted(recorded.keys() & found.keys()):
        if _identity(recorded[key]) != _identity(found[key]):
            yield finding("state.changed", f"{where}: {key}", expected=_spell(recorded[key]), found=_spell(found[key]))


def _identity(entry: Entry) -> tuple[object, ...]:
    return entry.dtype, tuple(entry.shape), entry.digest


def _spell(entry: Entry) -> str:
    shape = "x".join(map(str, entry.shape)) or entry.role
    return f"{entry.dtype} {shape} sha256 {entry.digest[:16]}".strip()


CHECK = DrillCheck("state", "D2", examine)
