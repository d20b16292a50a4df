"""Loss spikes in a log, robustly: a loss far above the running median of the steps before it, counted in median absolute deviations.

Neither the spike itself nor those before it move a median, so a spike does not hide the next one, as it would with mean and variance.
1.4826 MAD is the standard deviation of normal noise. Source: F. R. Hampel, "The influence curve and its role in robust estimation", 1974.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from validators.retention.policy import SpikeRule

_TO_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True)
class Spike:
    """Steps `first` to `last` whose loss stood out; the highest was `loss`, where the running median was `usual`."""

    first: int
    last: int
    loss: float
    usual: float

    def spell(self) -> str:
        """Return it in words.

        Returns:
            "steps 95 to 96: 4.9 where 2.5 was usual".
        """
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps}: {self.loss:.4g} where {self.usual:.4g} was usual"


def find_spikes(losses: Sequence[tuple[int, float]], rule: SpikeRule) -> tuple[Spike, ...]:
    """Return the spikes of a run.

    Args:
        losses: step and loss, in order. What is not finite counts as a spike once enough steps lie before it.
        rule: what counts as one.

    Returns:
        Spikes; steps that stand out within a tenth of a window of each other are one.
    """
    spikes: list[Spike] = []
    for step, loss, usual in _outstanding(losses, rule):
        last = spikes[-1] if spikes else None
        if last is not None and step - last.last <= max(1, rule.window // 10) * _stride(losses):
            spikes[-1] = Spike(last.first, step, max(last.loss, loss), last.usual)
        else:
            spikes.append(Spike(step, step, loss, usual))
    return tuple(spikes)


def _stride(losses: Sequence[tuple[int, float]]) -> int:
    # Steps between logged ones: the least gap.
    return max(1, min((late[0] - early[0] for early, late in pairwise(losses)), default=1))


def _outstanding(losses: Sequence[tuple[int, float]], rule: SpikeRule) -> Iterator[tuple[int, float, float]]:
    # Steps that stand out, with the median of the window before them. The window leaves out what stood out, until that lasts for a whole
    # window: then it is the new level.
    window: deque[float] = deque(maxlen=rule.window)
    outside: deque[float] = deque(maxlen=rule.window)
    for step, loss in losses:
        usual, limit = _limit(window, rule)
        if len(window) >= max(5, rule.window // 4) and not loss <= limit:
            yield step, loss, usual
            outside.append(loss)
            if len(outside) == rule.window:
                window = deque((one for one in outside if math.isfinite(one)), maxlen=rule.window)
                outside.clear()
            continue
        outside.clear()
        if math.isfinite(loss):
            window.append(loss)


def _limit(window: Sequence[float], rule: SpikeRule) -> tuple[float, float]:
    if not window:
        return math.nan, math.inf
    usual = median(window)
    deviation = _TO_DEVIATION * median(abs(loss - usual) for loss in window)
    return usual, usual + max(rule.deviations * deviation, rule.floor * abs(usual))
