"""The steps of a drill: find the saves, read two of them whole, judge. Between them travel paths of stored values."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.errors import FormatError
from reports.model import CheckResult
from reports.write import replace_text
from tasks.engine.restoring.digests import digest_entries
from tasks.engine.restoring.facts import gather_facts
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.retrying import RETRIES
from tasks.saves import list_saves, open_save
from validators.drills.check import run_drill_check
from validators.drills.checks import DRILL_CHECKS
from validators.drills.consistency import known_step
from validators.drills.evidence import Drilled, DrillEvidence, PastDrill, Restored, Resumed, Sabotage, Save, Step
from validators.drills.facts import Record
from validators.drills.goals import Goals, Numbers
from validators.drills.record import RECORD_NAME, record_from_json, record_to_json
from validators.drills.stored import read_stored, write_stored


@dataclass(frozen=True, slots=True)
class Found:
    """The saves of a run, by step."""

    root: str
    saves: tuple[Save, ...]
    pointer: str
    leftovers: tuple[str, ...]
    interval_seconds: float
    find_seconds: float

    def complete(self) -> list[Save]:
        """Return the saves that can be read.

        Returns:
            Saves, the oldest first.
        """
        return [save for save in self.saves if save.is_complete]


@dataclass(frozen=True, slots=True)
class DrillFacts:
    """What the steps of a drill found, as paths and small values. `found` is a Found, `drilled` are Drilled."""

    level: str
    found: Path
    drilled: tuple[Path, ...]
    goals: Goals
    numbers: Numbers
    log: tuple[Step, ...]
    history: tuple[PastDrill, ...]
    versions: dict[str, str]
    restored: tuple[Restored, ...] = ()
    resumed: Resumed | None = None
    sabotage: tuple[Sabotage, ...] = ()
    exported: str = ""
    reasons: tuple[tuple[str, str], ...] = ()


@task(name="find saves", cache_policy=NO_CACHE)
def find_saves(root: Path, also: tuple[Path, ...], folder: Path, clock: Callable[[], float]) -> Path:
    """List a run's saves.

    Args:
        root: the run's root, or one save.
        also: more roots of the same saves.
        folder: the run folder.
        clock: counts seconds.

    Returns:
        Path of a Found.
    """
    saves = list_saves(root, also, clock)
    found = Found(str(root), saves.saves, saves.pointer, saves.leftovers, saves.interval_seconds(), saves.find_seconds)
    return write_stored(found, folder / "saves.json")


@task(name="read save", cache_policy=NO_CACHE, **RETRIES)
def read_save(save: Save, records: Path | None, folder: Path, workers: int, clock: Callable[[], float]) -> Path:
    """Read every byte of a save, and what was recorded of it before.

    Args:
        save: a complete one.
        records: where drills keep the records they make; None looks for none.
        folder: the run folder.
        workers: tensors read at a time.
        clock: counts seconds.

    Returns:
        Path of a Drilled.

    Raises:
        FormatError: its record is damaged.
    """
    begun = clock()
    reader = open_save(save)
    facts = gather_facts(reader)
    source = SourceBytes(reader, reader.catalog())
    try:
        entries, damage = digest_entries(source, list(facts.entries.values()), workers)
    finally:
        source.files.close()
    seconds = clock() - begun
    facts = replace(facts, entries=entries)
    nbytes = sum(entry.nbytes for entry in entries.values())
    drilled = Drilled(save, facts, damage, find_record(save, facts.root, records) if records else None, nbytes, seconds)
    return write_stored(drilled, folder / f"{save.name}.drilled.json")


@task(name="judge", cache_policy=NO_CACHE)
def judge_drill(facts: DrillFacts, clock: Callable[[], float]) -> tuple[CheckResult, ...]:
    """Run the checks of a drill.

    Args:
        facts: what its steps found.
        clock: counts seconds.

    Returns:
        One result per check.
    """
    evidence = gather_evidence(facts)
    return tuple(run_drill_check(check, evidence, clock) for check in DRILL_CHECKS)


def gather_evidence(facts: DrillFacts) -> DrillEvidence:
    """Return all that a drill's checks judge.

    Args:
        facts: what its steps found.

    Returns:
        The evidence.
    """
    found = read_stored(Found, facts.found)
    return DrillEvidence(
        facts.level,
        found.saves,
        found.pointer,
        found.leftovers,
        tuple(read_stored(Drilled, path) for path in facts.drilled),
        facts.goals,
        facts.numbers,
        facts.restored,
        facts.resumed,
        facts.sabotage,
        facts.log,
        facts.history,
        facts.exported,
        dict(facts.reasons),
        facts.versions,
    )


def measure_numbers(found: Found, newest: Drilled | None, log: Sequence[Step], tokens_per_step: int, rto: Mapping[str, float]) -> Numbers:
    """Return recovery time, work lost, storage and interval.

    Args:
        found: the saves.
        newest: the newest complete one, read.
        log: what the trainer logged.
        tokens_per_step: as the owner says, 0 when unsaid.
        rto: seconds by phase.

    Returns:
        The numbers; without a complete save no work lost is known.
    """
    lost = _work_lost(found, newest, log, tokens_per_step) if newest else Numbers()
    return replace(
        lost,
        rto=rto,
        nbytes=newest.nbytes if newest else 0,
        read_seconds=newest.seconds if newest else 0.0,
        used_nbytes=sum(save.nbytes for save in found.saves),
        free_nbytes=disk_usage(found.root).free,
        interval_seconds=found.interval_seconds,
    )


def _work_lost(found: Found, newest: Drilled, log: Sequence[Step], tokens_per_step: int) -> Numbers:
    step = known_step(newest)
    if log:
        lost = lose_from_log(log, step, newest.save.saved_at, newest.facts.ranks)
    else:
        latest, interval = max(save.saved_at for save in found.saves), found.interval_seconds
        seconds = latest - newest.save.saved_at + interval if interval else None
        steps = max(0, max((save.step for save in found.saves if save.step is not None), default=step) - step)
        lost = Numbers(rpo_seconds=seconds, rpo_steps=steps, rpo_basis="times of files: up to one interval more than the newest save tells")
    if lost.rpo_tokens is None and lost.rpo_steps is not None and tokens_per_step:
        return replace(lost, rpo_tokens=lost.rpo_steps * tokens_per_step)
    return lost


def lose_from_log(log: Sequence[Step], step: int, saved_at: float, ranks: int) -> Numbers:
    """Return the work since a save, as the trainer logged it.

    Args:
        log: what the trainer logged; not empty.
        step: of the save.
        saved_at: when its files were written, for logs that skip its step or its time.
        ranks: how many have files in it.

    Returns:
        Steps; seconds and tokens where every step since then, of every rank, tells them.
    """
    after = [logged for logged in log if logged.step > step]
    if not after:
        return Numbers(rpo_seconds=0.0, rpo_steps=0, rpo_tokens=0, rpo_basis="the training log")
    times = [logged.time for logged in after if logged.time]
    is_counted = all(logged.tokens for logged in after) and len({logged.rank for logged in after}) >= ranks
    at_save = max((logged.time for logged in log if logged.step == step), default=0.0) or saved_at
    return Numbers(
        rpo_seconds=max(0.0, max(times) - at_save) if times else None,
        rpo_steps=max(logged.step for logged in after) - step,
        rpo_tokens=sum(logged.tokens for logged in after) if is_counted else None,
        rpo_basis="the training log",
    )


def find_record(save: Save, root: str, records: Path) -> Record | None:
    """Return what was recorded of a save: its own file, else what an earlier drill wrote down.

    Args:
        save: any save.
        root: the folder in it that its catalog counts from, where `record` writes.
        records: where drills keep theirs.

    Returns:
        The record, or None.

    Raises:
        FormatError: it is damaged.
    """
    for path in (Path(root) / RECORD_NAME, record_path(save, records)):
        if path.is_file():
            return record_from_json(path.read_text(encoding="utf-8", errors="replace"), str(path))
    return None


def record_path(save: Save, records: Path) -> Path:
    """Return where a drill keeps the record of a save that has none of its own.

    Args:
        save: any save.
        records: the folder of such records.

    Returns:
        A path, unique by the save's own.
    """
    digest = hashlib.sha256(str(Path(save.path).absolute()).encode()).hexdigest()[:16]
    return records / f"{save.name}-{digest}.json"


def keep_record(drilled: Drilled, records: Path, versions: dict[str, str], made: str) -> Path | None:
    """Write down what was read of a save, unless something was recorded before or could not be read.

    Args:
        drilled: a save, read.
        records: where drills keep their records.
        versions: of what took part.
        made: when, as ISO 8601.

    Returns:
        The file written, or None.
    """
    if drilled.record is not None or drilled.damage:
        return None
    records.mkdir(parents=True, exist_ok=True)
    return replace_text(record_path(drilled.save, records), record_to_json(make_record(drilled, "drill", versions, made)))


def make_record(drilled: Drilled, made_by: str, versions: dict[str, str], made: str) -> Record:
    """Return the record of a save.

    Args:
        drilled: it, read.
        made_by: "record" or "drill".
        versions: of what took part.
        made: when, as ISO 8601.

    Returns:
        The record.

    Raises:
        FormatError: something of it could not be read.
    """
    if drilled.damage:
        first = drilled.damage[0]
        raise FormatError(f"{first.key} cannot be read: {first.what}", where=drilled.save.path, remedy="Record another save.")
    return Record(made, made_by, drilled.facts.entries, versions)
