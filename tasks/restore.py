"""The steps of a drill that run real processes: restore a save by torch's own loader, and continue training from it."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.errors import RequestError
from tasks.engine.formats.dcp import DcpReader
from tasks.engine.formats.dcp_metadata import SavedTensor
from tasks.engine.restoring.digests import digest_entries
from tasks.engine.restoring.facts import gather_facts
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.links import link_save
from tasks.restoring.jobs import FolderAsk, RankAnswer, RestoreJob, ResumeJob, StateDifference, TensorAsk, WorldAnswer
from tasks.restoring.launch import restore, resume
from tasks.saves import open_save
from validators.drills.consistency import known_step
from validators.drills.evidence import Difference, Drilled, Restored, Resumed, Save, Step
from validators.drills.stored import read_stored

# Key of a value in the trainer's state → what it is part of; the first row that fits
_PARTS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"(?:^|\.)rng|random"), "rng"),
    (re.compile(r"dataloader|data_loader|sampler"), "data"),
    (re.compile(r"sched"), "scheduler"),
    (re.compile(r"^optim.*\.step$"), "step"),
    (re.compile(r"^optim.*\.exp_avg$"), "first moment"),
    (re.compile(r"^optim.*\.exp_avg_sq$"), "second moment"),
    (re.compile(r"^optim.*param_groups"), "hyperparameter"),
    (re.compile(r"^optim"), "moment"),
    (re.compile(r"^(?:train_state|trainer|progress)"), "counter"),
)


@dataclass(frozen=True, slots=True)
class ResumeWish:
    """How to continue training: `spec` is `module:function`, `saved_by` how many ranks had saved."""

    spec: str
    world: int
    saved_by: int
    steps: int
    seconds: float


@task(name="restore", cache_policy=NO_CACHE)
def restore_save(drilled_at: Path, worlds: tuple[int, ...], folder: Path, limits: tuple[int, float]) -> list[Restored]:
    """Restore a save by torch's own loader at several world sizes, and save it again at the first.

    Args:
        drilled_at: a Drilled of format dcp, in one folder tree.
        worlds: how many ranks, each in turn.
        folder: the run folder.
        limits: bytes that may be held at once, and seconds to wait.

    Returns:
        One per world size.

    Raises:
        FormatError: the process ended without an answer.
    """
    drilled = read_stored(Drilled, drilled_at)
    limit_nbytes, seconds = limits
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        again = Path(scratch) / "again"
        save_at = worlds[0] if 2 * drilled.nbytes <= limit_nbytes else 0
        job = RestoreJob(_folders(drilled, Path(scratch)), worlds, scratch, save_at, str(again), limit_nbytes // 2)
        answers = restore(job, folder, seconds).worlds
        return [_restored(drilled, answer, again if answer.world == save_at else None) for answer in answers]


@task(name="resume", cache_policy=NO_CACHE)
def resume_save(drilled_at: Path, wish: ResumeWish, folder: Path) -> Resumed:
    """Continue training from a save with the user's own step.

    Args:
        drilled_at: a Drilled of format dcp.
        wish: how.
        folder: the run folder.

    Returns:
        What the ranks saw.

    Raises:
        FormatError: the process ended without an answer.
    """
    from tasks.restoring.worker import first_cause

    drilled = read_stored(Drilled, drilled_at)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        job = ResumeJob(_folders(drilled, Path(scratch)), wish.spec, wish.world, wish.steps, scratch)
        ranks = resume(job, folder, wish.seconds).ranks
    first = known_step(drilled)
    return Resumed(
        drilled.save.name,
        first,
        wish.world,
        wish.saved_by,
        steps=tuple(step for rank in ranks for step in _steps(rank, first)),
        differences=tuple(place_difference(d) for rank in ranks for d in rank.differences),
        compared=sum(rank.compared for rank in ranks),
        refusal=first_cause([rank.refusal for rank in ranks]),
        first_step_seconds=max((rank.first_step_seconds for rank in ranks), default=0.0),
        load_seconds=max((rank.load_seconds for rank in ranks), default=0.0),
    )


def why_not_restored(sound: Sequence[Drilled]) -> str:
    """Return why torch's own loader cannot restore what was drilled.

    Args:
        sound: the saves that were read whole.

    Returns:
        A reason; "" when it can.
    """
    if not sound:
        return "no complete save"
    formats = sorted({drilled.facts.format for drilled in sound} - {"dcp"})
    return f"torch's own loader restores dcp, this is {', '.join(formats)}" if formats else ""


def refuse_resume(complete: Sequence[Save]) -> None:
    """Raise if the newest save is of a format that no restore puts into a trainer's state.

    Args:
        complete: saves that can be read, the oldest first.

    Raises:
        RequestError: it is not dcp.
    """
    if complete and complete[-1].format != "dcp":
        raise RequestError(
            f"continues from what torch's own loader restored, which reads dcp; {complete[-1].name} is {complete[-1].format}",
            where="--resume",
            remedy="Leave it out: levels D1 and D2 are for every format.",
        )


def choose_worlds(saved: int, limit: int) -> tuple[int, ...]:
    """Return the world sizes to restore at: as saved, half, double and one.

    Args:
        saved: ranks that saved.
        limit: processes that may run at a time.

    Returns:
        Sizes, the saved one first where it fits; no two alike.
    """
    wanted = [saved, saved // 2, 2 * saved, 1]
    return tuple(dict.fromkeys(size for size in wanted if 1 <= size <= limit)) or (limit,)


def count_ranks(drilled: Drilled, log: Sequence[Step]) -> int:
    """Return how many ranks wrote a save: no fewer than have files, and no fewer than logged its step.

    A log may be of one rank only, and ranks whose values others hold too write no file.

    Args:
        drilled: the save.
        log: what they logged.

    Returns:
        Ranks; 1 when nothing tells.
    """
    step = known_step(drilled)
    of_save = [logged.rank for logged in log if logged.step == step] or [logged.rank for logged in log]
    return max(max(of_save, default=-1) + 1, drilled.facts.ranks, 1)


def count_steps(drilled: Drilled, log: Sequence[Step], wanted: int) -> int:
    """Return how many steps to continue for.

    Args:
        drilled: the save.
        log: what was logged.
        wanted: at most so many.

    Returns:
        As many as are logged after the save; 3 without a log.
    """
    first = known_step(drilled)
    return min(wanted, max((step.step for step in log), default=first) - first) or 3


def place_difference(difference: StateDifference) -> Difference:
    """Return a difference with what it is part of.

    Args:
        difference: as a rank saw it.

    Returns:
        The same; what no row of the table names is the model's if it is a tensor, else "other" (a trainer's own, such as a time).
    """
    part = part_of(difference.key)
    is_other = part == "model" and difference.kind == "value"
    return Difference(difference.key, "other" if is_other else part, difference.kind, difference.found)


def part_of(key: str) -> str:
    """Return what a value of the trainer's state is part of.

    Args:
        key: its dotted key.

    Returns:
        A word of the table; "model" for what no row names.
    """
    return next((part for pattern, part in _PARTS if pattern.search(key)), "model")


def _steps(rank: RankAnswer, first: int) -> list[Step]:
    return [Step(first + number, rank.rank, s.loss, s.lr, s.batch, s.rng) for number, s in enumerate(rank.steps, 1)]


def _folders(drilled: Drilled, scratch: Path) -> tuple[FolderAsk, ...]:
    # Torch's loader reads one folder: files of several roots are linked into one.
    reader, facts = open_save(drilled.save), drilled.facts
    assert isinstance(reader, DcpReader)
    saved = reader.saved_as()
    inner_folders = dict.fromkeys(one.inner for one in saved)
    root = link_save(drilled.save, scratch / "gathered", tuple(inner_folders)) if drilled.save.also else Path(reader.catalog().root)
    asks = []
    for inner in inner_folders:
        here = [one for one in saved if one.inner == inner]
        tensors = [
            TensorAsk(one.key, one.item.key, one.item.path, one.item.shape, one.item.dtype)
            for one in here
            if isinstance(one.item, SavedTensor)
        ]
        objects = [(o.item.key, o.item.path) for o in here if not isinstance(o.item, SavedTensor) and o.key not in facts.unread]
        asks.append(FolderAsk(str(root / inner), inner, tuple(tensors), tuple(objects)))
    return tuple(asks)


def _restored(drilled: Drilled, answer: WorldAnswer, again: Path | None) -> Restored:
    made = Restored(drilled.save.name, answer.world, answer.digests, answer.refusal, answer.seconds)
    if again is None or answer.refusal:
        return made
    reader = open_save(replace(drilled.save, path=str(again), also=()))
    facts = gather_facts(reader)
    source = SourceBytes(reader, reader.catalog())
    try:
        entries, _ = digest_entries(source, [entry for entry in facts.entries.values() if entry.role != "object"], 1)
    finally:
        source.files.close()
    values = {key: repr(value) for key, value in facts.values.items()}
    return replace(made, saved_again={key: entry.digest for key, entry in entries.items()}, values_again=values)
