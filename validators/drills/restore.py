"""D3: torch's own loader gives back every tensor exactly, at the saved and at other world sizes, and saving again changes nothing."""

from collections.abc import Iterator

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding, Measure
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import Drilled, DrillEvidence, Restored


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Judge what the restores gave.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings; how many tensors were compared at which world sizes.
    """
    if not evidence.restored:
        return Skip(evidence.reasons.get("restore", "nothing was restored"))
    drilled = {one.save.name: one for one in evidence.sound}
    findings = [found for restored in evidence.restored for found in _judge(restored, drilled[restored.save])]
    compared = sum(len(restored.digests) for restored in evidence.restored)
    measured: dict[str, Measure] = {
        "world sizes": ", ".join(str(restored.world_size) for restored in evidence.restored),
        "tensors compared": compared,
        "saved again": sum(len(restored.saved_again or ()) for restored in evidence.restored),
        "seconds": max(restored.seconds for restored in evidence.restored),
    }
    return Outcome(tuple(findings), compared or len(findings), measured)


def _judge(restored: Restored, drilled: Drilled) -> Iterator[Finding]:
    where = f"{restored.save} at {restored.world_size} ranks"
    if restored.refusal:
        yield finding("restore.refused", where, expected="torch's loader restores it", found=restored.refusal)
        return
    wanted = {key: entry.digest for key, entry in drilled.facts.entries.items() if entry.role != "object"}
    for key in sorted(wanted):
        found = restored.digests.get(key, "")
        if found != wanted[key]:
            yield finding("restore.differs", f"{where}: {key}", expected=f"sha256 {wanted[key][:16]}", found=found[:16] or "not restored")
    if restored.saved_again is not None:
        yield from _fixed_point(where, restored, wanted, drilled)


def _fixed_point(where: str, restored: Restored, wanted: dict[str, str], drilled: Drilled) -> Iterator[Finding]:
    again = restored.saved_again or {}
    odd = [key for key in wanted.keys() | again.keys() if wanted.get(key) != again.get(key)]
    before = {key: repr(value) for key, value in drilled.facts.values.items() if key not in drilled.facts.files}
    odd += [key for key, value in restored.values_again.items() if before.get(key, value) != value]
    if odd:
        yield finding(
            "restore.not-fixed", f"{where}: {name_some(odd)}", expected="the same after load, save and load", found="other values or names"
        )


CHECK = DrillCheck("restore", "D3", examine)
