"""How often to save, and how much storage that takes: Young's and Daly's intervals, and the bytes of what is kept.

T is the *period*: from the begin of a save to the begin of the next, which is what a trainer is set to. C is how long a save holds
training, M the mean time between failures, R the time a recovery takes. Young and Daly count from the end of a save, so that C is added to
theirs: Young's T = C + sqrt(2 M C); Daly refines it where C is not small beside M. Saxena et al. count from begin to begin, and R too:
availability, (T - C) / T * M / (M + R + T / 2), is best at T = C + sqrt(2 (M + R) C + C^2). A failure costs T / 2 and the recovery.

Sources: J. W. Young, CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
22(3), 2006 (its tau leaves the dump out); Saxena et al., arXiv 2410.18124, 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from types import MappingProxyType

from validators.drills.goals import young_interval

# What Adam with fp32 masters keeps of a parameter whose weights are in bf16 → bytes
BYTES_PER_PARAMETER: Mapping[str, int] = MappingProxyType({"weights": 2, "fp32 masters": 4, "first moments": 4, "second moments": 4})
_SPARE_TENTHS = 12  # of a save: free space that must be left for the next one
MIN_KEPT = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known. 0 is "not known"; `detection_seconds` is how long a silent fault may go unseen."""

    mtbf_seconds: float
    save_seconds: float
    num_parameters: int
    budget_nbytes: int = 0
    recovery_seconds: float = 0.0
    detection_seconds: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """Periods in seconds, from begin to begin; shares are of all time; `keep` is how many full saves the budget holds beside the one being
    written (0: no budget is known), `needed` how many reach back beyond what is found late.
    """

    young_seconds: float
    daly_seconds: float
    available_seconds: float
    save_share: float
    rework_share: float
    tokens_a_day: float
    save_nbytes: int
    weights_nbytes: int
    keep: int
    needed: int
    warnings: tuple[str, ...]


def advise(asked: Asked) -> Advice:
    """Return how often to save, and how many saves fit.

    Args:
        asked: mean time between failures, cost of a save, parameters, budget.

    Returns:
        The advice, for Young's interval.
    """
    period = young_interval(asked.mtbf_seconds, asked.save_seconds) + asked.save_seconds
    save_nbytes = asked.num_parameters * sum(BYTES_PER_PARAMETER.values())
    save_share = asked.save_seconds / period
    rework_share = min(1 - save_share, (period / 2 + asked.recovery_seconds) / asked.mtbf_seconds)
    keep = max(0, (10 * asked.budget_nbytes - _SPARE_TENTHS * save_nbytes) // (10 * save_nbytes))
    needed = max(MIN_KEPT, ceil(asked.detection_seconds / period) + 1)
    return Advice(
        period,
        daly_period(asked.mtbf_seconds, asked.save_seconds),
        available_period(asked.mtbf_seconds, asked.save_seconds, asked.recovery_seconds),
        save_share,
        rework_share,
        (save_share + rework_share) * 86400 * asked.tokens_per_second,
        save_nbytes,
        asked.num_parameters * BYTES_PER_PARAMETER["weights"],
        keep,
        needed,
        tuple(_warn(asked, period, keep, needed, save_share + rework_share)),
    )


def daly_period(mtbf_seconds: float, save_seconds: float) -> float:
    """Return Daly's interval, with the save that ends it.

    Args:
        mtbf_seconds: mean time between failures.
        save_seconds: how long a save holds training.

    Returns:
        Seconds from the begin of a save to the begin of the next.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds + save_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return sqrt(2 * save_seconds * mtbf_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9)


def available_period(mtbf_seconds: float, save_seconds: float, recovery_seconds: float) -> float:
    """Return the period at which most time is trained, recovery counted.

    Args:
        mtbf_seconds: mean time between failures.
        save_seconds: how long a save holds training.
        recovery_seconds: how long a recovery takes.

    Returns:
        Seconds from the begin of a save to the begin of the next.
    """
    return save_seconds + sqrt(2 * (mtbf_seconds + recovery_seconds) * save_seconds + save_seconds**2)


def _warn(asked: Asked, period: float, keep: int, needed: int, lost_share: float) -> list[str]:
    told = []
    if lost_share >= 1 - 1e-9:
        told.append("saves and recovery take all of the time: training does not advance")
    if asked.save_seconds >= asked.mtbf_seconds / 2:
        told.append("a save takes so long that failures hardly leave time for one: save asynchronously")
    if asked.budget_nbytes and keep < needed:
        told.append(f"the budget holds {keep} saves beside the one being written, {needed} are needed: raise it, or keep weights only")
    if asked.detection_seconds > period:
        told.append("faults are found later than saves are made: keep older ones too, or every kept one may have the fault")
    return told
