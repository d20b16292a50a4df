"""D1: a save holds what a resume needs. Weights alone bring back a model, not a training run."""

from collections.abc import Iterator

from reports.codes import finding
from reports.model import Finding
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.consistency import train_step
from validators.drills.evidence import Drilled, DrillEvidence
from validators.drills.facts import StateFacts
from validators.drills.inventory import Component, take_inventory

# Component → the code for when it is missing beside an optimizer's state
MISSING = {
    "lr scheduler": "components.scheduler",
    "random numbers": "components.random-numbers",
    "data position": "components.data-position",
    "train step": "components.train-step",
    "gradient scaler": "components.scaler",
}


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Judge what the chosen saves hold.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings, and the newest save's inventory as measures.
    """
    if evidence.newest is None:
        return Skip("no complete save")
    found = [f for drilled in evidence.sound for f in _judge(drilled)]
    parts = take_inventory(evidence.newest.facts)
    return Outcome(tuple(found), sum(len(d.facts.entries) for d in evidence.sound), {p.name: _spell(p) for p in parts})


def _judge(drilled: Drilled) -> Iterator[Finding]:
    name = drilled.save.name
    parts = {part.name: part for part in take_inventory(drilled.facts)}
    if parts["optimizer moments"].presence == "missing":
        names = drilled.facts.names()
        if any("param_groups" in key for key in names):
            if _keeps_moments(drilled.facts):
                yield finding(
                    "components.optimizer-lost", name, expected="moments of the parameters", found="param_groups without any moment"
                )
        else:
            yield finding("components.model-only", name, expected="optimizer state beside the weights", found="weights only")
        return
    for part, code in MISSING.items():
        if parts[part].presence == "missing":
            yield finding(code, name, expected=part, found="nothing that is it, or that it could be derived from")
    if parts["data position"].presence == "derivable":
        yield finding("components.data-derived", name, expected="a saved data position", found=parts["data position"].detail)


def _keeps_moments(facts: StateFacts) -> bool:
    # Adam has betas, SGD a momentum that may be 0; before the first step no optimizer has any.
    if train_step(facts.values) == 0:
        return False
    momentum = [value for key, value in facts.values.items() if key.endswith(".momentum")]
    return any(".betas" in name for name in facts.names()) or any(momentum)


def _spell(part: Component) -> str:
    return part.presence + (f": {part.detail}" if part.detail else "")


CHECK = DrillCheck("components", "D1", examine)
