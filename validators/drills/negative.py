"""D2: the drill refuses what is damaged. Copies of the newest save, each damaged in one way, were shown to the code that chooses."""

from reports.codes import finding
from reports.model import Measure
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import DrillEvidence


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Judge what became of the damaged copies.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings; per damage, what was chosen instead.
    """
    if not evidence.sabotage:
        return Skip(evidence.reasons.get("negative", "no damaged copy was tried"))
    findings = []
    for tried in evidence.sabotage:
        if not tried.refused:
            findings.append(finding("negative.not-refused", tried.name, expected="refused as incomplete", found="accepted"))
        elif tried.chosen != tried.wanted:
            found = tried.chosen or "no save"
            findings.append(finding("negative.no-fallback", tried.name, expected=tried.wanted or "no save", found=found))
    measured: dict[str, Measure] = {tried.name: tried.chosen or "refused, no older save" for tried in evidence.sabotage}
    return Outcome(tuple(findings), len(evidence.sabotage), measured)


CHECK = DrillCheck("negative", "D2", examine)
