"""How often a run logs, and what its log leaves out.

A run may log every step and later every tenth: how far apart lines usually are is judged beside each pair of them, not for the whole log.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

_BESIDE = 6  # pairs on each side; even, so that of two distances that alternate the longer is the usual one


class Logged(Protocol):
    """A line of a log."""

    @property
    def step(self) -> int:
        """Its step."""
        ...


def find_gaps(log: Sequence[Logged]) -> tuple[tuple[int, int], ...]:
    """Return the stretches that a log leaves out.

    Between two lines there is a gap where they are farther apart than is usual before them, and than is usual behind them. Usual is the
    median of the six pairs on a side; at the ends of a log, where a side is empty, as far as any of the other side.

    Args:
        log: lines, by step.

    Returns:
        First and last step of each.
    """
    apart = [late.step - early.step for early, late in pairwise(log)]
    least = min(apart, default=0)
    return tuple(
        (log[place].step + 1, log[place + 1].step - 1)
        for place, here in enumerate(apart)
        if here > least and _is_gap(apart[max(0, place - _BESIDE) : place], here, apart[place + 1 : place + 1 + _BESIDE])
    )


def is_gap_after(log: Sequence[Logged], place: int) -> bool:
    """Return whether there is a gap between a line and the next. Looks at the lines beside them alone.

    Args:
        log: lines, by step.
        place: index of the line; not the last.

    Returns:
        Whether `find_gaps` names it.
    """
    first = max(0, place - _BESIDE)
    near = log[first : place + _BESIDE + 2]
    apart = [late.step - early.step for early, late in pairwise(near)]
    return _is_gap(apart[: place - first], apart[place - first], apart[place - first + 1 :])


def _is_gap(before: Sequence[int], here: int, after: Sequence[int]) -> bool:
    return here > max(_usual(before, after), _usual(after, before))


def _usual(side: Sequence[int], other: Sequence[int]) -> int:
    return sorted(side)[len(side) // 2] if side else max(other, default=1)
