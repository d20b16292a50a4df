"""Loss spikes in a log, robustly: a loss far above the running median of the steps before it, counted in median absolute deviations.

Neither the spike itself nor those before it move a median, so a spike does not hide the next one, as it would with mean and variance.
1.4826 MAD is the standard deviation of normal noise. Source: F. R. Hampel, "The influence curve and its role in robust estimation", 1974.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import median_low

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
        Spikes; steps that stand out within a tenth of a window of each other are one. Its loss is one that is not finite, if there is
        any, else the highest.
    """
    spikes: list[Spike] = []
    near = max(1, rule.window // 10) * _stride(losses)
    for step, loss, usual in _outstanding(losses, rule):
        last = spikes[-1] if spikes else None
        if last is not None and step - last.last <= near:
            spikes[-1] = Spike(last.first, step, max(last.loss, loss, key=lambda one: one if isfinite(one) else inf), last.usual)
        else:
            spikes.append(Spike(step, step, loss, usual))
    return tuple(spikes)


def _stride(losses: Sequence[tuple[int, float]]) -> int:
    # Steps between logged ones: the median, which a line out of turn does not move.
    apart = [late - early for (early, _), (late, _) in pairwise(losses)]
    return max(1, median_low(apart)) if apart else 1


class _Window:
    """The latest losses: in order of time, to let the oldest go, and of size, for the median and the deviations from it.

    Args:
        size: how many at most.
        losses: to begin with, no more than `size`.
    """

    def __init__(self, size: int, losses: Iterable[float] = ()) -> None:
        self._size = size
        self._latest = deque(losses)
        self._sorted = sorted(self._latest)

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, loss: float) -> None:
        if len(self._latest) == self._size:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(loss)
        insort(self._sorted, loss)

    def median(self) -> float:
        half = len(self._sorted) // 2
        return self._sorted[half] if len(self._sorted) % 2 else (self._sorted[half - 1] + self._sorted[half]) / 2

    def median_deviation(self, centre: float) -> float:
        half = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._farthest(half + 1, centre)
        return (self._farthest(half, centre) + self._farthest(half + 1, centre)) / 2

    def _farthest(self, count: int, centre: float) -> float:
        # Distance of the count-th nearest to the centre: in order of size, the nearest lie side by side; halving finds the first of them.
        first, last = 0, len(self._sorted) - count
        while first < last:
            middle = (first + last) // 2
            if centre - self._sorted[middle] > self._sorted[middle + count] - centre:
                first = middle + 1
            else:
                last = middle
        return max(centre - self._sorted[first], self._sorted[first + count - 1] - centre)


def _outstanding(losses: Iterable[tuple[int, float]], rule: SpikeRule) -> Iterator[tuple[int, float, float]]:
    # Steps that stand out, with the median of the window before them. The window leaves out what stood out, until that lasts for a whole
    # window: then it is the new level.
    window = _Window(rule.window)
    outside: list[float] = []
    for step, loss in losses:
        usual, limit = _limit(window, rule)
        if len(window) >= max(5, rule.window // 4) and not loss <= limit:
            yield step, loss, usual
            outside.append(loss)
            if len(outside) == rule.window:
                window = _Window(rule.window, filter(isfinite, outside))
                outside.clear()
            continue
        outside.clear()
        if isfinite(loss):
            window.add(loss)


def _limit(window: _Window, rule: SpikeRule) -> tuple[float, float]:
    if not len(window):
        return nan, inf
    usual = window.median()
    deviation = _TO_DEVIATION * window.median_deviation(usual)
    return usual, usual + max(rule.deviations * deviation, rule.floor * abs(usual))
