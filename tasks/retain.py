"""Doing what a retention plan says: saves are renamed away, then deleted, so that a kill leaves each whole, gone, or marked as going.

Nothing outside the root is touched: links are removed, never followed, and a step folder that is a link is not acted on.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from reports.errors import FormatError
from reports.write import replace_text
from tasks.claims import find_claims, find_pointed, find_readers, find_verified
from tasks.saves import look_at
from tasks.sight import THINNED_NAME, list_going, see_save, see_saves
from validators.retention.evaluations import Evaluation
from validators.retention.evidence import Action, Claim, Pin, RetentionPlan, SeenSave
from validators.retention.pins import propose_pins
from validators.retention.plan import RetentionEvidence, plan_retention
from validators.retention.policy import RetentionPolicy
from validators.retention.training_log import LogLine


class ChangedError(Exception):
    """A save is not what it was when its fate was planned."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made of."""

    plan: RetentionPlan
    saves: tuple[SeenSave, ...]
    pins: tuple[Pin, ...]


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
        FormatError: no save lies in the root, it cannot be listed, or the history of drills is damaged.
    """
    consumed = {line.step: line.consumed for line in log}
    saves = tuple(replace(save, tokens=consumed.get(save.step, 0) or save.step * policy.tokens_per_step) for save in see_saves(root))
    going = list_going(root)
    if not saves and not going:
        raise FormatError("holds no save of a training run", where=str(root), remedy="Point at the folder that holds a folder per step.")
    pins = propose_pins(log, policy)
    claims = (*find_claims(runs, root, saves), *find_pointed(root, saves), *_of_results(evaluations, saves))
    evidence = RetentionEvidence(str(root), saves, claims, pins, find_verified(runs, root, saves), going)
    plan = plan_retention(evidence, policy, lambda save: look_at(root / save.name, save.step).is_complete)
    return Planned(plan, saves, pins)


def apply_plan(root: Path, planned: Planned, runs: Path) -> tuple[tuple[str, str], ...]:
    """Delete what a plan says, the oldest first; what an interrupted run left goes before.

    Args:
        root: the run's root, resolved.
        planned: made just before.
        runs: where run folders are: what a run began to read since the plan was made stays.

    Returns:
        What was not done, and why: a save that changed or is read since it was planned, or that could not be deleted.
    """
    left = []
    for name in planned.plan.unfinished:
        left += _try(name, partial(shutil.rmtree, root / name))
    seen = {save.name: save for save in planned.saves}
    for decision in planned.plan.decisions:
        act = _ACTS.get(decision.action)
        if act is not None:
            save = seen[decision.name]
            left += _try(decision.name, partial(_act_on_same, act, root, save, runs))
    return tuple(left)


def _act_on_same(act: "_Act", root: Path, save: SeenSave, runs: Path) -> None:
    for reader in find_readers(runs, root, save.name):
        raise ChangedError(f"{reader} is reading it")
    if see_save(root / save.name, save.step, root) != replace(save, tokens=0):
        raise ChangedError("it changed since it was planned")
    act(root, save)


def _try(name: str, work: Callable[[], None]) -> list[tuple[str, str]]:
    try:
        work()
    except (OSError, ChangedError) as error:
        return [(name, str(error))]
    return []


def _delete(root: Path, save: SeenSave) -> None:
    going = root / f".{save.name}.shardwright-going"
    (root / save.name).rename(going)
    _sync(root)
    shutil.rmtree(going)


def _thin(root: Path, save: SeenSave) -> None:
    # The mark first: a save without it is whole, one with it is never taken for a whole one.
    folder = root / save.name
    if THINNED_NAME not in os.listdir(folder):
        replace_text(folder / THINNED_NAME, json.dumps({"deleted": save.thinnable}, indent=1) + "\n")
        _sync(folder)
    for name in save.thinnable:
        (folder / name).unlink()
    for name in sorted({str(Path(name).parent) for name in save.thinnable} - {"."}):
        if not any((folder / name).iterdir()):
            (folder / name).rmdir()


_Act = Callable[[Path, SeenSave], None]
_ACTS: Mapping[Action, _Act] = MappingProxyType({"go": _delete, "thin": _thin})


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _of_results(evaluations: Sequence[Evaluation], saves: Sequence[SeenSave]) -> Iterator[Claim]:
    by_step = {one.step: one.where for one in evaluations}
    yield from (Claim(save.name, f"{by_step[save.step]} evaluates it") for save in saves if save.step in by_step)
