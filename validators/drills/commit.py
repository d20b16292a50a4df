"""D1: the saves are committed. A complete one can be chosen, every byte of it can be read, and nothing half-written is taken for one."""

from collections.abc import Iterator

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding, Measure
from validators.check import Outcome
from validators.drills.check import DrillCheck
from validators.drills.evidence import Drilled, DrillEvidence, Save

THINNED = "thinned"  # cause of a save that retention left its weights only: meant to be so
# Cause of an incomplete save → its code
PASSED_OVER = {
    "uncommitted": "commit.uncommitted",
    "ranks-missing": "commit.ranks-missing",
    "cut-short": "commit.cut-short",
    "overwritten": "commit.overwritten",
    "hostile": "commit.hostile",
    "no-model": "commit.unreadable",
    "damaged": "commit.unreadable",
}


def examine(evidence: DrillEvidence) -> Outcome:
    """Judge the saves.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings; saves that were passed over are warnings, since an older one is whole.
    """
    findings = [found for save in evidence.saves for found in _judge(save)]
    findings += [found for drilled in evidence.drilled for found in _damage(drilled)]
    findings += _pointer(evidence)
    findings += [finding("commit.leftover", name, expected="no temporary file", found=name) for name in evidence.leftovers]
    if not evidence.sound:
        causes = name_some(f"{save.name}: {save.cause or 'damaged'}" for save in evidence.saves)
        findings.append(
            finding("commit.none-complete", name_some(s.name for s in evidence.saves), expected="a complete save", found=causes)
        )
    measured: dict[str, Measure] = {
        "saves": len(evidence.saves),
        "complete": sum(save.is_complete for save in evidence.saves),
        "chosen": ", ".join(drilled.save.name for drilled in evidence.sound) or "none",
    }
    return Outcome(tuple(findings), len(evidence.saves), measured)


def _judge(save: Save) -> Iterator[Finding]:
    if not save.is_complete and save.cause != THINNED:
        yield finding(PASSED_OVER[save.cause], save.name, expected="a complete save", found=save.refusal)
    for name in save.leftovers if save.is_complete else ():
        yield finding("commit.leftover", f"{save.name}/{name}", expected="no temporary or empty file", found=name)


def _damage(drilled: Drilled) -> Iterator[Finding]:
    for damage in drilled.damage:
        yield finding(
            "commit.damaged", f"{drilled.save.name}: {damage.key}", expected="bytes as the writer recorded them", found=damage.what
        )


def _pointer(evidence: DrillEvidence) -> Iterator[Finding]:
    newest = evidence.newest
    if not evidence.pointer or newest is None:
        return
    named = evidence.pointer.rstrip("/").rsplit("/", 1)[-1]
    if named in (newest.save.name, str(newest.save.step)):
        return
    is_older = any(save.is_complete and named in (save.name, str(save.step)) for save in evidence.saves)
    code = "commit.pointer-older" if is_older else "commit.pointer"
    yield finding(code, "latest", expected=newest.save.name, found=evidence.pointer)


CHECK = DrillCheck("commit", "D1", examine)
