"""What a run's owner wants of its checkpoints, and the numbers a drill measures: recovery time, work lost, storage, save interval.

Young's interval: T = sqrt(2 * MTBF * C), C the time training is held by a save. Source: J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from validators.drills.readiness import Declared


@dataclass(frozen=True, slots=True)
class Goals:
    """Targets; 0 is "none". `save_seconds` is how long a save holds training, `mtbf_seconds` the mean time between failures."""

    rto_seconds: float = 0.0
    rpo_seconds: float = 0.0
    rpo_steps: int = 0
    rpo_tokens: int = 0
    mtbf_seconds: float = 0.0
    save_seconds: float = 0.0
    max_save_share: float = 0.05
    spare_factor: float = 1.2
    tokens_per_step: int = 0
    tokens_per_second: float = 0.0
    declared: Declared = field(default_factory=Declared)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What was measured. `rto` is seconds by phase (find, read, load, first step); `rpo_*` the work since the newest complete save.

    `rpo_basis` says from what the work lost was told; `interval_seconds` is between saves, 0 with fewer than two. None is
    not known, which is not the same as nothing lost.
    """

    rto: Mapping[str, float] = field(default_factory=dict)
    rpo_seconds: float | None = None
    rpo_steps: int | None = None
    rpo_tokens: int | None = None
    rpo_basis: str = ""
    nbytes: int = 0
    read_seconds: float = 0.0
    used_nbytes: int = 0
    free_nbytes: int = 0
    interval_seconds: float = 0.0

    @property
    def rto_seconds(self) -> float | None:
        """All phases together; None when nothing could be restored."""
        return sum(self.rto.values()) if self.rto else None

    @property
    def bytes_per_second(self) -> float:
        """How fast the newest save was read; 0 when nothing was."""
        return self.nbytes / self.read_seconds if self.read_seconds else 0.0


def young_interval(mtbf_seconds: float, save_seconds: float) -> float:
    """Return the interval between saves that loses least.

    Args:
        mtbf_seconds: mean time between failures.
        save_seconds: how long training is held by a save.

    Returns:
        Seconds; 0 when either is not known.
    """
    return sqrt(2 * mtbf_seconds * save_seconds)


def save_share(goals: Goals, numbers: Numbers) -> float:
    """Return the share of training time that saves take.

    Args:
        goals: how long a save takes.
        numbers: how often one is made.

    Returns:
        0 to 1; 0 when either is not known.
    """
    interval = goals.declared.save_interval_seconds or numbers.interval_seconds
    return min(1.0, goals.save_seconds / interval) if interval else 0.0
