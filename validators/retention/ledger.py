"""The token ledger: what a run has at each step, lined up by step and consumed tokens, and where its records disagree.

A *row* is a step of which something exists besides a line of the log: a save, a result, an export, a drill. A *gap* is a stretch of steps
that the log leaves out. Tokens are *told* where someone counted them; estimates stand in where nobody did, and are held against nothing.

torchtitan's saves hold the count of one rank, its log that of all (validators.drills.consistency). They agree where the log's is the save's
times a whole number that divides the number of ranks which saved; two saves of the run must show that number, or all that show one.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding
from validators.drills.consistency import ranks_counted
from validators.retention.evaluations import Evaluation
from validators.retention.training_log import LogLine, tokens_at


@dataclass(frozen=True, slots=True)
class Counted:
    """What a save's own counters tell: None and "" where it holds none. `tokens` are those of the run where `ranks` is 1, else they may be
    those of one of so many ranks.
    """

    step: int | None = None
    tokens: int | None = None
    data: str = ""
    ranks: int = 1


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
    """All there is of one step. `tokens` are those consumed up to and with it, None where nobody knows; `told` are who tells them and what
    each does, those of one rank as those of all.
    """

    step: int
    tokens: int | None
    saves: tuple[LedgerSave, ...]
    log: LogLine | None
    evaluations: tuple[Evaluation, ...]
    events: tuple[Event, ...]
    told: Mapping[str, int] = field(default_factory=dict)


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
        Rows, by step. Tokens are the log's, else a save's, a result's or a run's; else an estimate, between lines of the log or of steps of
        one size.
    """
    log = {line.step: line for line in sources.log}
    saves, events = _by_step(sources.saves), _by_step(sources.events)
    evaluations = _by_step(sources.evaluations)
    rows = [
        LedgerRow(step, None, saves.get(step, ()), log.get(step), evaluations.get(step, ()), events.get(step, ()))
        for step in sorted(saves.keys() | events.keys() | evaluations.keys())
    ]
    meshes = _find_meshes(rows)
    return tuple(_count(row, meshes, tokens_at(sources.log, row.step) or tokens_per_step * row.step) for row in rows)


def _count(row: LedgerRow, meshes: Sequence[int], estimate: int) -> LedgerRow:
    of_all = {"the log": row.log.recorded if row.log else 0} | {one.where: one.tokens for one in row.evaluations}
    own = {save.name: save.counted.tokens or 0 for save in row.saves} | {event.run_id: event.tokens or 0 for event in row.events}
    total, count = _first(of_all), _first(own)
    mesh = min(meshes, key=lambda mesh: abs(mesh * count - (total or estimate)), default=1)
    log = {"the log": of_all.pop("the log")}
    told = {name: count for name, count in (log | {name: mesh * count for name, count in own.items()} | of_all).items() if count}
    is_mesh_known = total or len(meshes) == 1 or (meshes and estimate) or all(save.counted.ranks == 1 for save in row.saves)
    tokens = (_first(told) if is_mesh_known else 0) or estimate or None
    return LedgerRow(row.step, tokens, row.saves, row.log, row.evaluations, row.events, told)


def _first(told: Mapping[str, int]) -> int:
    return next((count for count in told.values() if count), 0)


def _find_meshes(rows: Sequence[LedgerRow]) -> list[int]:
    # How many ranks' counts make the run's: 1 where saves count the run, several where it went on with another mesh.
    seen: Counter[int] = Counter()
    for row in rows:
        total = (row.log.recorded if row.log else 0) or next((one.tokens for one in row.evaluations if one.tokens), 0)
        seen.update(mesh for save in row.saves if (mesh := ranks_counted(save.counted.tokens or 0, total, save.counted.ranks)))
    return [mesh for mesh, times in sorted(seen.items()) if times > 1 or len(seen) == 1]


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


def judge_ledger(rows: Sequence[LedgerRow], sources: Sources, gaps: Sequence[tuple[int, int]]) -> list[Finding]:
    """Return what disagrees, and what is missing.

    Args:
        rows: the ledger.
        sources: what it is made of.
        gaps: of the log, by step.

    Returns:
        Findings: of the log, then by step, then of results that say of no step.
    """
    found = [finding("ledger.log-gap", f"steps {first} to {last}", expected="a line of the log", found="none") for first, last in gaps]
    found += _falling(sources.log)
    for row in rows:
        found += [*_steps(row), *_tokens(row), *_data(row), *_lacking(row, sources.log, gaps)]
    unplaced = [one.where for one in sources.evaluations if one.step is None]
    if unplaced:
        found.append(finding("ledger.unplaced", name_some(unplaced), expected="results of a step", found="nothing that tells which"))
    return found


def _falling(log: Sequence[LogLine]) -> Iterator[Finding]:
    for early, late in pairwise(line for line in log if line.recorded):
        if late.recorded <= early.recorded:
            where, told = f"step {late.step}", f"{late.recorded} after {early.recorded} at step {early.step}"
            yield finding("ledger.tokens-fall", where, expected="more tokens at a later step", found=told)


def _steps(row: LedgerRow) -> Iterator[Finding]:
    for save in row.saves:
        if save.counted.step is not None and save.counted.step != row.step:
            yield finding("ledger.step-differs", save.name, expected=f"step {row.step}, as its folder says", found=f"{save.counted.step}")


def _tokens(row: LedgerRow) -> Iterator[Finding]:
    yield from _differing("ledger.tokens-differ", row.step, {name: str(count) for name, count in row.told.items()}, "tokens")


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


def _lacking(row: LedgerRow, log: Sequence[LogLine], gaps: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    if row.log is None and log and _is_left_out(row.step, log, gaps):
        yield finding("ledger.not-logged", f"step {row.step}", expected="a line of the log", found="none")
    made = [*(one.where for one in row.evaluations), *(event.run_id for event in row.events if event.kind != "drill")]
    if made and not row.saves:  # a drill read a save, and made nothing of it
        yield finding("ledger.save-gone", f"step {row.step}", expected="the save that these were made of", found=name_some(made))


def _is_left_out(step: int, log: Sequence[LogLine], gaps: Sequence[tuple[int, int]]) -> bool:
    # A run that logs every tenth step leaves out none between two of them.
    before = bisect_right(gaps, step, key=lambda gap: gap[0])
    return not log[0].step <= step <= log[-1].step or (before > 0 and step <= gaps[before - 1][1])
