"""The drill: can training come back from its newest checkpoint, how long does that take, and how much work would be lost.

Nothing of the run is written to. What was read is recorded in the runs' folder, so that the next drill can compare.
"""

import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prefect import flow

from flows.drill_requests import DrillRequest
from flows.reading import reading
from flows.refusals import refuse_paths
from flows.run import Outcome, PrefectRunner, RedVerdictError, Run, Runner, show_ended
from flows.run_folder import now
from reports.errors import RequestError
from reports.model import CheckResult, PastRun, Report
from reports.moment import Moment
from reports.paths import real_path
from reports.write import write_report
from tasks.drill import DrillFacts, Found, find_saves, judge_drill, keep_record, measure_numbers, read_save
from tasks.drill_history import append_history, find_export, read_history
from tasks.restore import (
    ResumeWish,
    choose_worlds,
    count_ranks,
    count_steps,
    refuse_resume,
    restore_save,
    resume_save,
    why_not_restored,
)
from tasks.restoring.trainer import refuse_unfound
from tasks.sabotage import sabotage
from tasks.saves import choose_older
from validators.drills.consistency import count_tokens, known_step
from validators.drills.drift import list_keys, list_order, spelling_of, versions_of
from validators.drills.evidence import Drilled, PastDrill, Restored, Resumed, Sabotage, Save, Step
from validators.drills.goals import Goals, Numbers
from validators.drills.log import read_goals, read_log
from validators.drills.stored import read_stored, write_stored

RECORDS = "records"  # folder in the runs' folder for the records that drills make


class DrillFailedError(RedVerdictError):
    """A check failed: the run cannot be relied on to come back."""


@dataclass(frozen=True, slots=True)
class Real:
    """What real processes gave, and why there is nothing from them."""

    restored: tuple[Restored, ...] = ()
    resumed: Resumed | None = None
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    # What the request's files say.
    goals: Goals
    log: tuple[Step, ...]
    history: tuple[PastDrill, ...]


def check_request(request: DrillRequest) -> None:
    """Raise for what the request alone shows to be wrong.

    Args:
        request: what to drill.

    Raises:
        ReleaseError: a path is missing or of the wrong kind, or a file of goals or steps is malformed.
    """
    refuse_paths(request)
    if request.resume:
        refuse_unfound(request.resume)
    _read_asked(request)


def _read_asked(request: DrillRequest) -> _Asked:
    goals = read_goals(request.goals) if request.goals is not None else Goals()
    log = read_log(request.log) if request.log is not None else ()
    return _Asked(goals, log, read_history(request.runs, request.root))


def drill_line(request: DrillRequest, run: Run) -> Outcome:
    """Drill a run.

    Args:
        request: what to drill; `check_request` has passed it.
        run: how tasks are called, where the report goes.

    Returns:
        The outcome of a green drill.

    Raises:
        DrillFailedError: a check failed.
        ReleaseError: the work could not be done.
    """
    asked, root = _read_asked(request), request.root.absolute()
    call, records = run.runner.call, request.runs.absolute() / RECORDS
    also = tuple(path.absolute() for path in request.also)
    found_at = run.phase("find", lambda: call(find_saves, root, also, run.folder, run.clock))
    found = read_stored(Found, found_at)
    if request.resume:
        refuse_resume(found.complete())
    drilled = _read_saves(request, run, found, asked.history)
    sound = [read for _, read in drilled if not read.damage]
    real = _restore(request, run, drilled, asked.log) if request.reach == "D3" else Real()
    newest, rto = (sound[0], _rto(run, real, found)) if sound else (None, {})
    numbers = measure_numbers(found, newest, asked.log, asked.goals.tokens_per_step, rto)
    tried = _sabotage(run, found, sound) if sound and request.reach != "D1" else ()
    paths, versions = tuple(path for path, _ in drilled), dict(run.environment)
    facts = DrillFacts(
        *(request.reach, found_at, paths, asked.goals, numbers, asked.log, asked.history, versions),
        restored=real.restored,
        resumed=real.resumed,
        sabotage=tried,
        exported=find_export(request.runs, root),
        reasons=(*real.reasons, *(() if tried else (("negative", _why_no_copy(sound)),))),
    )
    write_stored(facts, run.folder / "facts.json")
    results = run.phase("judge", lambda: call(judge_drill, facts, run.clock))
    past = replace(_past(run, request, results, sound, numbers), damaged=tuple(read.save.name for _, read in drilled if read.damage))
    outcome = _write(request, run, results, sound, (*asked.history, past))
    for read in sound:
        keep_record(read, records, versions, past.finished)
    append_history(request.runs, request.root, past)
    if not outcome.verdict.green:
        raise DrillFailedError(outcome)
    return outcome


def _read_saves(request: DrillRequest, run: Run, found: Found, history: tuple[PastDrill, ...]) -> list[tuple[Path, Drilled]]:
    # The newest save that can be read whole, those that were tried before it, and an older one.
    complete = found.complete()
    tried: list[tuple[Path, Drilled]] = []
    for save in reversed(complete):
        tried.append(_read(request, run, save, "read" if not tried else f"read {save.name}"))
        if not tried[-1][1].damage:
            older = choose_older(complete, save, history)
            return [*tried, *([_read(request, run, older, f"read older {older.name}")] if older else [])]
    return tried


def _read(request: DrillRequest, run: Run, save: Save, phase: str) -> tuple[Path, Drilled]:
    records = request.runs.absolute() / RECORDS
    path = run.phase(
        phase, lambda: run.runner.call(read_save, save, records, run.folder, request.workers, run.clock), nbytes_read=save.nbytes
    )
    return path, read_stored(Drilled, path)


def _sabotage(run: Run, found: Found, sound: list[Drilled]) -> tuple[Sabotage, ...]:
    newest = sound[0].save
    older = [save for save in found.complete() if (save.step or 0) < (newest.step or 0)]
    with tempfile.TemporaryDirectory(dir=run.folder) as scratch:
        return run.phase("sabotage", lambda: run.runner.call(sabotage, newest, older[-1] if older else None, Path(scratch)))


def _why_no_copy(sound: list[Drilled]) -> str:
    return "no damaged copy was made: the save's roots do not make one folder" if sound else "no complete save"


def _restore(request: DrillRequest, run: Run, drilled: list[tuple[Path, Drilled]], log: tuple[Step, ...]) -> Real:
    # Real processes, for the sound saves: the newest at several world sizes, the older one at its own.
    sound = [(path, read) for path, read in drilled if not read.damage]
    reason = why_not_restored([read for _, read in sound])
    if reason:
        return Real(reasons=(("restore", reason), ("resume", reason)))
    restored: list[Restored] = []
    saved_by = count_ranks(sound[0][1], log)
    world = request.world or saved_by
    if request.resume and world > request.max_ranks:
        raise RequestError(
            f"was asked to resume a save of {world} ranks, and --max-ranks is {request.max_ranks}",
            where=sound[0][1].save.name,
            remedy="Raise --max-ranks if this machine can run so many, or continue with fewer by --world.",
        )
    worlds = choose_worlds(saved_by, request.max_ranks)
    limits = (request.memory, request.timeout)
    for number, (path, read) in enumerate(sound):
        sizes = worlds if number == 0 else worlds[:1]
        name = "restore" if number == 0 else f"restore {read.save.name}"
        restored += run.phase(name, partial(run.runner.call, restore_save, path, sizes, run.folder, limits))
    if not request.resume:
        return Real(tuple(restored))
    path, read = sound[0]
    wish = ResumeWish(request.resume, world, saved_by, count_steps(read, log, request.steps), request.timeout)
    resumed = run.phase("resume", lambda: run.runner.call(resume_save, path, wish, run.folder))
    return Real(tuple(restored), resumed)


def _rto(run: Run, real: Real, found: Found) -> dict[str, float]:
    # What a restore would wait for: finding the newest complete save, reading it, loading it, the first step. Nothing when it was refused.
    if (real.resumed is not None and real.resumed.refusal) or (real.restored and real.restored[0].refusal):
        return {}
    read = sum(phase.seconds for phase in run.phases if phase.name.startswith("read") and not phase.name.startswith("read older"))
    phases = {"find": found.find_seconds, "read": read}
    if real.resumed is not None:
        return phases | {"load": real.resumed.load_seconds, "first step": real.resumed.first_step_seconds}
    return phases | ({"load": real.restored[0].seconds} if real.restored else {})


def _write(
    request: DrillRequest, run: Run, results: tuple[CheckResult, ...], sound: list[Drilled], history: tuple[PastDrill, ...]
) -> Outcome:
    report = _report(request, run, results, sound, history)
    paths = write_report(report, run.folder)
    if request.junit is not None:
        request.junit.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(paths.junit, request.junit)
    return Outcome(report, paths, report.verdict())


def _report(
    request: DrillRequest, run: Run, results: tuple[CheckResult, ...], sound: list[Drilled], history: tuple[PastDrill, ...]
) -> Report:
    chosen = sound[0].save if sound else None
    return Report(
        run_id=run.run_id,
        kind="drill",
        action="restorable",
        subject=str(request.root.absolute()),
        source=f"{chosen.path} (newest complete save)" if chosen else "no complete save",
        checkpoint=str(real_path(Path(chosen.path))) if chosen else "",
        plan_digest="",
        results=results,
        witnesses=(),
        environment=run.environment,
        started=run.started,
        finished=now(),
        phases=tuple(run.phases),
        history=tuple(PastRun(p.run_id, p.finished, p.level, p.step, p.green, p.rto_seconds, p.rpo_seconds, p.nbytes) for p in history),
        moment=Moment(known_step(sound[0]), count_tokens(sound[0].facts.values)) if sound else Moment(),
    )


def _past(run: Run, request: DrillRequest, results: tuple[CheckResult, ...], sound: list[Drilled], numbers: Numbers) -> PastDrill:
    facts = sound[0].facts if sound else None
    report = _report(request, run, results, sound, ())
    verdict = report.verdict()
    return PastDrill(
        run.run_id,
        report.finished,
        request.reach,
        report.moment.step,
        verdict.green,
        verdict.line,
        numbers.rto_seconds,
        numbers.rpo_seconds,
        numbers.nbytes,
        tuple(one.save.name for one in sound),
        versions_of(facts, run.environment) if facts else dict(run.environment),
        list_keys(facts) if facts else (),
        list_order(facts) if facts else (),
        spelling_of(facts) if facts else "",
        consumed_tokens=report.moment.consumed_tokens,
        listings={one.save.name: one.save.listing for one in sound},
    )


@flow(name="restore drill", flow_run_name="drill {request.root.name}", validate_parameters=True)
def restore_drill(request: DrillRequest) -> str:
    """Prove that training can come back from a run's checkpoints.

    Args:
        request: what to drill.

    Returns:
        Path of the HTML report.
    """
    return show_ended(lambda: run_drill(request, PrefectRunner()))


def run_drill(request: DrillRequest, runner: Runner) -> Outcome:
    """Drill a run in a new run folder.

    Args:
        request: what to drill.
        runner: how tasks are called.

    Returns:
        The outcome of a green drill.
    """
    check_request(request)
    run = Run.create("drill", request.runs, runner)
    with reading(run.folder, [request.root, *request.also]):
        return drill_line(request, run)
