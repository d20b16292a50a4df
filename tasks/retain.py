"""Doing what a retention plan says: saves are renamed away, then deleted, so that a kill leaves each whole, gone, or marked as going.

Nothing outside the root is touched: links are removed, never followed, and a step folder that is a link is not acted on.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reports.errors import CommitError, FormatError, RequestError
from tasks.claims import find_claims, find_settled, find_verified
from tasks.drill_history import history_state
from tasks.engine.writing.lock import ProcessLock
from tasks.listing import list_files
from tasks.moments import counted_tokens
from tasks.pointed import find_linked, find_pointed
from tasks.saves import look_at
from tasks.sight import GOING, list_going, see_save, see_saves
from tasks.thinning import keeps_weights, sync_folder, thin
from validators.retention.evaluations import Evaluation
from validators.retention.evidence import Action, Claim, Pin, RetentionPlan, SeenSave
from validators.retention.pins import LogSigns, find_signs, propose_pins
from validators.retention.plan import RetentionEvidence, plan_retention
from validators.retention.policy import RetentionPolicy
from validators.retention.training_log import LogLine, tokens_at

_CHANGED = "it changed since it was planned"


class ChangedError(Exception):
    """A save is not what it was when its fate was planned."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made of. `settled` are the run folders whose claims are in it, `let_go` the kinds of reports that hold
    nothing, `history` the state of the history of drills then.
    """

    plan: RetentionPlan
    saves: tuple[SeenSave, ...]
    pins: tuple[Pin, ...]
    signs: LogSigns
    settled: frozenset[str]
    let_go: frozenset[str]
    history: tuple[int, int]


def plan_root(root: Path, policy: RetentionPolicy, log: Sequence[LogLine], runs: Path, evaluations: Sequence[Evaluation] = ()) -> Planned:
    """Look at a run's saves, and decide what becomes of each. Changes nothing.

    Args:
        root: the training run's root, resolved.
        policy: what its owner wants.
        log: what it logged; empty without a log.
        runs: where run folders and the history of drills are.
        evaluations: results, whose saves stay.

    Returns:
        The plan.

    Raises:
        RequestError: the policy counts tokens, and nobody tells any.
        FormatError: no save lies in the root, it or `runs` cannot be listed, or the history of drills is damaged.
    """
    saves, going = tuple(_count_tokens(root, see_saves(root), policy, log)), list_going(root)
    if not saves and not going:
        raise FormatError("holds no save of a training run", where=str(root), remedy="Point at the folder that holds a folder per step.")
    if policy.every_tokens and not any(save.tokens for save in saves):
        raise RequestError("needs tokens", where="every_tokens", remedy="Give a --log that counts them, or tokens_per_step.")
    signs, settled, history = find_signs(log, policy), find_settled(runs), history_state(runs)
    pins = propose_pins(signs, policy)
    claims = (
        *find_claims(runs, root, saves, let_go=_let_go(policy)),
        *find_pointed(root, saves),
        *find_linked(root, saves),
        *_of_results(evaluations, saves),
    )
    evidence = RetentionEvidence(str(root), saves, claims, pins, find_verified(runs, root, saves), going)
    plan = plan_retention(
        evidence,
        policy,
        lambda save: look_at(root / save.name, save.step).is_complete,
        lambda save: bool(save.thinnable) and keeps_weights(root / save.name, save.thinnable),
    )
    return Planned(plan, saves, pins, signs, settled, _let_go(policy), history)


def _let_go(policy: RetentionPolicy) -> frozenset[str]:
    return frozenset() if policy.hold_drilled else frozenset({"drill"})


def put_back(root: Path, runs: Path) -> tuple[str, ...]:
    """Give saves their names back that an interrupted run had renamed, and not begun to delete. They are planned as any other then.

    Args:
        root: the run's root, resolved.
        runs: where run folders are.

    Returns:
        Their names.

    Raises:
        CommitError: another process is deleting.
        OSError: one could not be renamed.
    """
    found = []
    with _applying(root, runs):
        for going in list_going(root):
            name = GOING.sub(r"\1", going)
            if see_save(root / going, 0, root).is_complete and not os.path.lexists(root / name):
                (root / going).rename(root / name)
                found.append(name)
    return tuple(found)


def _applying(root: Path, runs: Path) -> ProcessLock:
    refusal = CommitError("another --apply of this run is going on", where=str(root), remedy="Wait for it.")
    runs.mkdir(parents=True, exist_ok=True)
    return ProcessLock(runs / f".retain-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}.lock", refusal)


def _count_tokens(root: Path, saves: Sequence[SeenSave], policy: RetentionPolicy, log: Sequence[LogLine]) -> Iterator[SeenSave]:
    # As the log tells, else as many as steps make; else as the save itself does, which is opened only where a rule asks for it.
    for save in saves:
        told = tokens_at(log, save.step) or save.step * policy.tokens_per_step
        if policy.every_tokens and save.is_complete and not told:
            told = counted_tokens(root / save.name)
        yield replace(save, tokens=told)


def apply_plan(root: Path, planned: Planned, runs: Path) -> tuple[tuple[str, str], ...]:
    """Delete what a plan says, the oldest first; what an interrupted run left goes before.

    Before each deletion it is looked at once more: the save, those that the plan relies on, and who names it now.

    Args:
        root: the run's root, resolved.
        planned: made just before.
        runs: where run folders are.

    Returns:
        What was not done, and why: a save that changed or is named since it was planned, or that could not be deleted.

    Raises:
        CommitError: another process is doing the same.
    """
    left = []
    with _applying(root, runs):
        for name in planned.plan.unfinished:
            left += _try(name, partial(shutil.rmtree, root / name))
        worker = _Worker(root, planned, runs)
        for decision in planned.plan.decisions:
            act = worker.acts.get(decision.action)
            if act is not None:
                left += _try(decision.name, partial(act, worker.seen[decision.name]))
    return tuple(left)


def _try(name: str, work: Callable[[], None]) -> list[tuple[str, str]]:
    try:
        work()
    except (OSError, FormatError, ChangedError) as error:
        return [(name, str(error))]
    return []


class _Worker:
    # Deletes saves of one plan.
    def __init__(self, root: Path, planned: Planned, runs: Path) -> None:
        self._root, self._planned, self._runs = root, planned, runs
        self.seen = {save.name: save for save in planned.saves}
        self._history = planned.history
        self.acts: Mapping[Action, Callable[[SeenSave], None]] = {"go": self._delete, "thin": self._thin}

    def _delete(self, save: SeenSave) -> None:
        folder, going = self._root / save.name, self._root / f".{save.name}.shardwright-going"
        if not os.path.lexists(folder):
            return  # its trainer was faster
        self._look_again(save)
        folder.rename(going)
        try:
            self._refuse_claimed(save)  # whoever begins to read it from here on does not find it; who began before has said so
        except BaseException:
            going.rename(folder)
            raise
        sync_folder(self._root)
        try:
            shutil.rmtree(going)
        except OSError as error:
            raise ChangedError(f"half-deleted, as {going.name}: {error}") from error

    def _thin(self, save: SeenSave) -> None:
        self._look_again(save)
        files = list_files(self._root / save.name)  # the mark says what these files are, so they must be those of the plan
        if files.digest() != save.listing:
            raise ChangedError(_CHANGED)
        thin(files, save.thinnable, partial(self._refuse_claimed, save))

    def _look_again(self, save: SeenSave) -> None:
        self._refuse_claimed(save)
        self._refuse_pointed(save)
        if not self._is_as_planned(save):
            raise ChangedError(_CHANGED)
        for name in self._planned.plan.relied_on:
            if not self._is_as_planned(self.seen[name]):
                raise ChangedError(f"{name}, without which nothing may go, changed since it was planned")
        if history_state(self._runs) != self._history:
            verified = [self.seen[name] for name in self._planned.plan.verified]
            if len(find_verified(self._runs, self._root, verified)) < len(verified):
                raise ChangedError("a drill since then did not find whole what the plan relies on")

    def _is_as_planned(self, save: SeenSave) -> bool:
        # Deleting one save takes a name from files that others share, and that changes nothing of them.
        return replace(see_save(self._root / save.name, save.step, self._root), linked=()) == replace(save, tokens=0, linked=())

    def _refuse_claimed(self, save: SeenSave) -> None:
        _refuse(find_claims(self._runs, self._root, (save,), self._planned.settled, self._planned.let_go), save)

    def _refuse_pointed(self, save: SeenSave) -> None:
        _refuse(find_pointed(self._root, self._planned.saves), save)


def _refuse(claims: Sequence[Claim], save: SeenSave) -> None:
    for because in (claim.because for claim in claims if claim.name == save.name):
        raise ChangedError(because)


def _of_results(evaluations: Sequence[Evaluation], saves: Sequence[SeenSave]) -> Iterator[Claim]:
    by_step = {one.step: one.where for one in evaluations}
    yield from (Claim(save.name, f"{by_step[save.step]} evaluates it") for save in saves if save.step in by_step)
