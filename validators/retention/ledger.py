"""The token ledger: what a run has at each step, lined up by step and consumed tokens, and where its records disagree.

A *row* is a step of which something exists besides a line of the log: a save, a result, an export, a drill. A *gap* is a stretch of steps
that the log leaves out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding
from validators.retention.evaluations import Evaluation
from validators.retention.training_log import LogLine


@dataclass(frozen=True, slots=True)
class Counted:
    """What a save's own counters tell: None and "" where it holds none."""

    step: int | None = None
    tokens: int | None = None
    data: str = ""


@dataclass(frozen=True, slots=True)
class LedgerSave:
    """A save in the ledger. `state` is "complete", or why it is not."""

    name: str
    step: int
    state: str
    counted: Counted = field(default_factory=Counted)


@dataclass(frozen=True, slots=True)
class Event:
    """A run of this product that was made of a step's save: its id, whether it was green, and the tokens that the save had counted then
    (None: it told none).
    """

    kind: str
    run_id: str
    step: int
    green: bool
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """All there is of one step. `tokens` are those consumed up to and with it, None where nobody tells."""

    step: int
    tokens: int | None
    saves: tuple[LedgerSave, ...]
    log: LogLine | None
    evaluations: tuple[Evaluation, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a ledger is made of."""

    saves: tuple[LedgerSave, ...]
    log: tuple[LogLine, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[Event, ...] = ()


def line_up(sources: Sources, tokens_per_step: int = 0) -> tuple[LedgerRow, ...]:
    """Return what a run has at each step.

    Args:
        sources: saves, log, results, runs.
        tokens_per_step: for runs that count none; 0 when nobody knows.

    Returns:
        Rows, by step.
    """
    log = {line.step: line for line in sources.log}
    saves, events = _by_step(sources.saves), _by_step(sources.events)
    evaluations = _by_step(sources.evaluations)
    rows = []
    for step in sorted(saves.keys() | events.keys() | evaluations.keys()):
        row = LedgerRow(step, None, saves.get(step, ()), log.get(step), evaluations.get(step, ()), events.get(step, ()))
        told = _told_tokens(row)
        rows.append(replace(row, tokens=told.pop("the log", 0) or tokens_per_step * step or next(iter(told.values()), None)))
    return tuple(rows)


class _Stepped(Protocol):
    @property
    def step(self) -> int | None: ...


S = TypeVar("S", bound=_Stepped)


def _by_step(things: Sequence[S]) -> dict[int, tuple[S, ...]]:
    found: dict[int, list[S]] = {}
    for thing in things:
        if thing.step is not None:
            found.setdefault(thing.step, []).append(thing)
    return {step: tuple(here) for step, here in found.items()}


def find_gaps(log: Sequence[LogLine]) -> tuple[tuple[int, int], ...]:
    """Return the stretches that a log leaves out.

    Args:
        log: lines, by step.

    Returns:
        First and last step of each; between lines as far apart as most are, nothing is left out.
    """
    apart = [late.step - early.step for early, late in pairwise(log)]
    usual = sorted(apart)[len(apart) // 2] if apart else 1
    return tuple((early.step + 1, late.step - 1) for early, late in pairwise(log) if late.step - early.step > usual)


def judge_ledger(rows: Sequence[LedgerRow], sources: Sources) -> list[Finding]:
    """Return what disagrees, and what is missing.

    Args:
        rows: the ledger.
        sources: what it is made of.

    Returns:
        Findings: of the log, then by step, then of results that say of no step.
    """
    found = [
        finding("ledger.log-gap", f"steps {first} to {last}", expected="a line of the log", found="none")
        for first, last in find_gaps(sources.log)
    ]
    found += _falling(sources.log)
    for row in rows:
        found += [*_steps(row), *_tokens(row), *_data(row), *_lacking(row, has_log=bool(sources.log))]
    unplaced = [one.where for one in sources.evaluations if one.step is None]
    if unplaced:
        found.append(finding("ledger.unplaced", name_some(unplaced), expected="results of a step", found="nothing that tells which"))
    return found


def _falling(log: Sequence[LogLine]) -> Iterator[Finding]:
    for early, late in pairwise(line for line in log if line.consumed):
        if late.consumed <= early.consumed:
            where, told = f"step {late.step}", f"{late.consumed} after {early.consumed} at step {early.step}"
            yield finding("ledger.tokens-fall", where, expected="more tokens at a later step", found=told)


def _steps(row: LedgerRow) -> Iterator[Finding]:
    for save in row.saves:
        if save.counted.step is not None and save.counted.step != row.step:
            yield finding("ledger.step-differs", save.name, expected=f"step {row.step}, as its folder says", found=f"{save.counted.step}")


def _tokens(row: LedgerRow) -> Iterator[Finding]:
    yield from _differing("ledger.tokens-differ", row.step, {name: str(count) for name, count in _told_tokens(row).items()}, "tokens")


def _told_tokens(row: LedgerRow) -> dict[str, int]:
    # Who tells tokens of a step, and how many.
    told = {"the log": row.log.consumed if row.log else 0}
    told |= {save.name: save.counted.tokens or 0 for save in row.saves}
    told |= {one.where: one.tokens for one in row.evaluations} | {event.run_id: event.tokens or 0 for event in row.events}
    return {name: count for name, count in told.items() if count}


def _data(row: LedgerRow) -> Iterator[Finding]:
    told = {"the log": row.log.data if row.log else ""}
    told |= {save.name: save.counted.data for save in row.saves} | {one.where: one.data for one in row.evaluations}
    yield from _differing("ledger.data-differs", row.step, {name: version for name, version in told.items() if version}, "data")


def _differing(code: str, step: int, told: Mapping[str, str], noun: str) -> Iterator[Finding]:
    # The first that tells is what the others are held against.
    names = list(told)
    for name in names[1:]:
        if told[name] != told[names[0]]:
            yield finding(code, f"step {step}: {name}", expected=f"{noun} {told[names[0]]}, as {names[0]} says", found=told[name])


def _lacking(row: LedgerRow, *, has_log: bool) -> Iterator[Finding]:
    if has_log and row.log is None:
        yield finding("ledger.not-logged", f"step {row.step}", expected="a line of the log", found="none")
    if not row.saves:
        made = [*(one.where for one in row.evaluations), *(event.run_id for event in row.events)]
        yield finding("ledger.save-gone", f"step {row.step}", expected="the save that these were made of", found=name_some(made))
