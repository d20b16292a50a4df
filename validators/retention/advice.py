"""How often to save, and how much storage that takes: Young's and Daly's intervals, and the bytes of what is kept.

T is the time between saves, C how long a save holds training, M the mean time between failures, R the time a recovery takes.
Young: T = sqrt(2 M C). Daly refines it where C is not small beside M. Counting recovery too, availability is best at
T = C + sqrt(2 (M + R) C + C^2).

Sources: J. W. Young, CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
22(3), 2006; Saxena et al., arXiv 2410.18124, 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from types import MappingProxyType

from validators.drills.goals import young_interval

# What Adam with fp32 masters keeps of a parameter whose weights are in bf16 → bytes
BYTES_PER_PARAMETER: Mapping[str, int] = MappingProxyType({"weights": 2, "fp32 masters": 4, "first moments": 4, "second moments": 4})
SPARE_FACTOR = 1.2  # of free space that must be left for the next save
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
    """Intervals in seconds; shares are of all time; `keep` is how many full saves the budget holds beside the one being written (0: no
    budget is known), `needed` how many reach back beyond what is found late.
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
    interval = young_interval(asked.mtbf_seconds, asked.save_seconds)
    save_nbytes = asked.num_parameters * sum(BYTES_PER_PARAMETER.values())
    save_share = asked.save_seconds / (interval + asked.save_seconds)
    rework_share = min(1 - save_share, (interval / 2 + asked.recovery_seconds) / asked.mtbf_seconds)
    keep = max(0, int(asked.budget_nbytes / save_nbytes - SPARE_FACTOR))
    needed = max(MIN_KEPT, ceil(asked.detection_seconds / interval) + 1)
    return Advice(
        interval,
        daly_interval(asked.mtbf_seconds, asked.save_seconds),
        available_interval(asked.mtbf_seconds, asked.save_seconds, asked.recovery_seconds),
        save_share,
        rework_share,
        (save_share + rework_share) * 86400 * asked.tokens_per_second,
        save_nbytes,
        asked.num_parameters * BYTES_PER_PARAMETER["weights"],
        keep,
        needed,
        tuple(_warn(asked, interval, keep, needed, save_share + rework_share)),
    )


def daly_interval(mtbf_seconds: float, save_seconds: float) -> float:
    """Return Daly's interval.

    Args:
        mtbf_seconds: mean time between failures.
        save_seconds: how long a save holds training.

    Returns:
        Seconds between the end of a save and the begin of the next.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return sqrt(2 * save_seconds * mtbf_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds


def available_interval(mtbf_seconds: float, save_seconds: float, recovery_seconds: float) -> float:
    """Return the interval at which most time is trained, recovery counted.

    Args:
        mtbf_seconds: mean time between failures.
        save_seconds: how long a save holds training.
        recovery_seconds: how long a recovery takes.

    Returns:
        Seconds.
    """
    return save_seconds + sqrt(2 * (mtbf_seconds + recovery_seconds) * save_seconds + save_seconds**2)


def _warn(asked: Asked, interval: float, keep: int, needed: int, lost_share: float) -> list[str]:
    told = []
    if lost_share >= 1 - 1e-9:
        told.append("saves and recovery take all of the time: training does not advance")
    if asked.save_seconds >= asked.mtbf_seconds / 2:
        told.append("a save takes so long that failures hardly leave time for one: save asynchronously")
    if asked.budget_nbytes and keep < needed:
        told.append(f"the budget holds {keep} saves beside the one being written, {needed} are needed: raise it, or keep weights only")
    if asked.detection_seconds > interval:
        told.append("faults are found later than saves are made: keep older ones too, or every kept one may have the fault")
    return told
