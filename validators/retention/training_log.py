"""The training log as the ledger reads it: one line per step of the run that is, with loss, consumed tokens and data version.

Lines come in the order of time; those of several ranks may interleave. A run that went back to an earlier save logs again: a rank comes to
a step below those that it had reached, or tells the loss or the tokens of a step again. There a new *attempt* begins. Lines of the earlier
ones at that step and above, of all ranks, are of a run that was given up, and are left out, though the new one may not have come as far
yet, or have fewer ranks. A rank's line of the same step overrides what it tells and leaves the rest; an evaluation's begins nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import attrgetter
from pathlib import Path

from reports.errors import RequestError
from validators.retention.cadence import is_gap_after
from validators.retention.log_rows import REMEDY, Row, read_rows

_NEAR = 6  # lines beside a step that are searched for tokens


@dataclass(frozen=True, slots=True)
class LogLine:
    """One step: mean loss over ranks, tokens consumed up to and with it (0: nobody tells), data version, and where.

    Tokens are those that the log states, else the sum of its lines' own; `is_estimated` where they are neither, but tokens_per_step for
    each step.
    """

    step: int
    loss: float | None = None
    consumed: int = 0
    data: str = ""
    where: str = ""
    is_estimated: bool = False

    @property
    def recorded(self) -> int:
        """Tokens that the log states or that its lines add up to; 0 where it tells none."""
        return 0 if self.is_estimated else self.consumed


def read_training_log(path: Path, tokens_per_step: int = 0) -> tuple[LogLine, ...]:
    """Return what a run logged.

    Args:
        path: JSON lines, trainer_state.json, or CSV; told apart by name.
        tokens_per_step: for logs that count no tokens; 0 when nobody knows.

    Returns:
        A line per step, in order. What was given up by going back to an earlier step is left out.

    Raises:
        RequestError: the file cannot be read, holds no step, or a line is none.
    """
    rows = _of_the_run_that_is(read_rows(path))
    if not rows:
        raise RequestError("holds no step", where=str(path), remedy=f"Give a log that has begun. {REMEDY}")
    return tuple(_merge(rows, tokens_per_step))


def tokens_at(log: Sequence[LogLine], step: int) -> int:
    """Return the tokens consumed up to and with a step, logged or between two logged ones.

    Args:
        log: lines, by step.
        step: any.

    Returns:
        Those of its line; else, between lines of the log with no gap between them, their straight line: exact where batches are of one
        size. 0 where nobody tells.
    """
    place = bisect_left(log, step, key=attrgetter("step"))
    if place < len(log) and log[place].step == step and log[place].consumed:
        return log[place].consumed
    before = next((at for at in range(place - 1, max(-1, place - 1 - _NEAR), -1) if log[at].consumed), None)
    after = next((at for at in range(place, min(len(log), place + _NEAR)) if log[at].consumed), None)
    if before is None or after is None or any(is_gap_after(log, at) for at in range(before, after)):
        return 0
    early, late = log[before], log[after]
    grown = late.consumed - early.consumed
    return early.consumed + grown * (step - early.step) // (late.step - early.step) if grown > 0 else 0


@dataclass(slots=True)
class _Attempt:
    begin: int
    ranks: dict[int, dict[int, Row]]  # rank → step → what its lines tell
    reached: dict[int, int]  # rank → its highest step


def _of_the_run_that_is(rows: Iterable[Row]) -> list[Row]:
    # By step; of a rank that went back farther than the first to do so there may be two of one step, the later one last.
    attempts = [_Attempt(0, {}, {})]
    for row in rows:
        attempt = attempts[-1]
        earlier = attempt.ranks.setdefault(row.rank, {}).get(row.step)
        if row.tells_training():
            if _is_back(row, earlier, attempt):
                attempt = _Attempt(row.step, {row.rank: {}}, {})
                attempts.append(attempt)
            attempt.reached[row.rank] = max(row.step, attempt.reached.get(row.rank, 0))
        attempt.ranks[row.rank][row.step] = row.over(earlier)
    kept: list[Row] = []
    until: float = inf
    for attempt in reversed(attempts):
        kept += [row for steps in attempt.ranks.values() for row in steps.values() if row.step < until]
        until = min(until, attempt.begin)
    kept.reverse()  # the latest attempt last
    return sorted(kept, key=attrgetter("step", "rank"))


def _is_back(row: Row, earlier: Row | None, attempt: _Attempt) -> bool:
    if earlier is not None and earlier.tells_training():
        return row.repeats(earlier)
    return row.step < attempt.reached.get(row.rank, 0)


def _merge(rows: Iterable[Row], tokens_per_step: int) -> Iterator[LogLine]:
    # Tokens are added up from the first step, 0 or 1, while no step is missing; behind a gap only what is stated counts.
    total, expected = 0, -1
    for number, (step, here) in enumerate(groupby(rows, key=attrgetter("step"))):
        merged = list({row.rank: row for row in here}.values())
        tokens = sum(row.tokens for row in merged)
        is_first = number == 0 and step <= 1
        is_whole = (is_first or step == expected) and (tokens > 0 or step == 0)
        total, expected = (total + tokens, step + 1) if is_whole else (0, -1)
        losses = [row.loss for row in merged if row.loss is not None]
        recorded = max(row.consumed for row in merged) or total
        yield LogLine(
            step,
            sum(losses) / len(losses) if losses else None,
            recorded or tokens_per_step * step,
            next((row.data for row in merged if row.data), ""),
            merged[0].where,
            is_estimated=not recorded and tokens_per_step * step > 0,
        )
