"""A check of a drill: a name, the level from which it runs, and a pure function of DrillEvidence. Running one never raises."""

from collections.abc import Callable
from dataclasses import dataclass

from reports.model import CheckResult
from validators.check import Outcome, attempt, conclude, describe_error
from validators.drills.evidence import DrillEvidence

LEVELS = ("D1", "D2", "D3")  # commit, state, resume: each includes those before


@dataclass(frozen=True, slots=True)
class Skip:
    """What a check says that has nothing to look at: why."""

    reason: str


@dataclass(frozen=True, slots=True)
class DrillCheck:
    """One thing that must be true of a run's checkpoints. `name` is its file's name; it runs at `level` and above."""

    name: str
    level: str
    examine: Callable[[DrillEvidence], Outcome | Skip]


def run_drill_check(check: DrillCheck, evidence: DrillEvidence, clock: Callable[[], float]) -> CheckResult:
    """Run one check. What goes wrong inside it becomes the status `errored`.

    Args:
        check: any check.
        evidence: what the drill saw.
        clock: seconds, as `time.perf_counter` counts them.

    Returns:
        `skipped` when it has nothing to look at or the drill's level is lower; else what it found.
    """
    if LEVELS.index(evidence.level) < LEVELS.index(check.level):
        return CheckResult(check.name, "skipped", reason=f"level {evidence.level} was asked for, it needs {check.level}")
    started = clock()
    outcome = attempt(lambda: check.examine(evidence))
    if isinstance(outcome, Exception):
        return CheckResult(check.name, "errored", seconds=clock() - started, reason=describe_error(outcome))
    if isinstance(outcome, Skip):
        return CheckResult(check.name, "skipped", reason=outcome.reason)
    return conclude(check.name, outcome, clock() - started)
