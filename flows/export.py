"""Export: load → merge → cast → write → checks → logits → publish.

`export_line` is the line itself; `export` is the Prefect flow around it. A release is published only when every check that ran on the
bytes in the stage has passed; the report is written either way.
"""

import errno
import shutil
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow

from flows.approval import ASKING
from flows.hooks import remove_what_is_staged, say_how_to_go_on
from flows.quantize_rules import read_rules
from flows.reading import reading
from flows.refusals import refuse_inputs, refuse_inside_source, refuse_paths, refuse_unknown_checks
from flows.refused_sources import reporting_refusals
from flows.requests import ExportRequest
from flows.run import WATCHING, Both, Outcome, PrefectRunner, Progress, RedVerdictError, Run, Runner, show_ended
from flows.run_folder import now
from reports.errors import ReleaseError, RequestError
from reports.model import Omission, Report
from reports.paths import real_path
from reports.write import write_report
from tasks.artifacts import ProgressArtifact
from tasks.check import check_plan, check_release, measure_release, read_encoded, read_statistics
from tasks.compare_logits import check_golden, compare_logits, merge_uncast
from tasks.engine.writing.sidecars import Lineage
from tasks.engine.writing.stage import Stage, lock_of
from tasks.handover import Compared, Judged, Loaded, Measured, ModelRequest, Planned, SourceRef
from tasks.load_shards import load_shards
from tasks.publish import digest_stage, publish, read_listed
from tasks.reshard import reshard
from tasks.sources import close_source
from tasks.threads import one_torch_thread
from tasks.write import finish_release, write_file
from validators.approval import judge_approval
from validators.check import has_tokenizer
from validators.checks import NAMED_AT_EXPORT
from validators.policy import REQUIRED_CHECKS
from validators.policy_file import read_policy
from validators.review import apply_policy

_UNFINISHED = "The checks are done; publishing had not finished when this was written."
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotPublishedError(RedVerdictError):
    """A check failed: nothing was published."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before the first byte is written."""

    assets: Path | None
    loaded: Loaded
    planned: Planned


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a report is made of."""

    prepared: Prepared
    judged: Judged
    compared: Compared = field(default_factory=Compared)
    measured: Measured | None = None


def prepare(request: ExportRequest, run: Run) -> Prepared:
    """Open the checkpoint, plan the export, and run the checks that need no tensor byte.

    Args:
        request: what to export.
        run: the run.

    Returns:
        The plan.

    Raises:
        ReleaseError: whatever the request, the assets or the source's metadata already show.
    """
    refuse_inputs(request)
    ref = SourceRef(
        request.source.absolute(), tuple(path.absolute() for path in request.also), request.step, tag=request.tag, weights=request.weights
    )
    loaded = run.phase("load shards", lambda: run.runner.call(load_shards, ref, run.folder))
    assets = request.assets or _own_assets(request.source.absolute(), loaded)
    wanted = ModelRequest(
        assets,
        request.family,
        request.dtype_code,
        request.drops,
        request.keep_tied_head,
        request.max_file,
        quantize=read_rules(request.quantize),
        gguf=request.gguf.upper(),
        title=request.to.absolute().name,
    )
    planned = run.phase("reshard", lambda: run.runner.call(reshard, loaded.ref, wanted, run.folder))
    judged = run.phase("check plan", lambda: run.runner.call(check_plan, planned, assets, request.skips, run.clock))
    if request.golden is not None and planned.config is not None and "logits" not in request.skips:
        run.runner.call(check_golden, planned, request.golden, assets)
    prepared = Prepared(assets, loaded, planned)
    if judged.failed():
        raise _refusal(judged, _report(request, run, Gathered(prepared, judged)))
    return prepared


def export_line(request: ExportRequest, run: Run) -> Outcome:
    """Export a checkpoint.

    Args:
        request: what to export.
        run: how tasks are called, where reports go.

    Returns:
        The outcome of a green run: the release is published.

    Raises:
        NotPublishedError: a check on the written release failed.
        ReleaseError: the work could not be done; nothing is left at the destination.
    """
    check_request(request)
    prepared = prepare(request, run)
    _refuse_unloadable(request, prepared.planned)
    destination = request.to.absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(destination, wait=request.wait):
        stage = Stage.create(destination, prepared.planned.digest, reached=run.reached)
        try:
            return _write_and_judge(request, run, prepared, stage)
        except ReleaseError:
            stage.discard()
            raise
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            stage.discard()
            raise _disk_full(destination, prepared.planned.nbytes, error) from error


def _write_and_judge(request: ExportRequest, run: Run, prepared: Prepared, stage: Stage) -> Outcome:
    planned, loaded, call = prepared.planned, prepared.loaded, run.runner.call
    _check_space(stage, planned)
    run.phase("write", lambda: _write(run, prepared, stage, request.workers), nbytes_read=loaded.nbytes, nbytes_written=planned.nbytes)
    measured = run.phase(
        "measure",
        lambda: call(measure_release, stage.folder, planned, loaded.roots, run.folder, request.workers),
        nbytes_read=planned.nbytes + loaded.nbytes,
    )
    compared = _compare(request, run, prepared, stage)
    judged = run.phase("check", lambda: call(check_release, stage.folder, planned, measured, compared, request.skips, run.clock))
    gathered = Gathered(prepared, judged, compared, measured)
    outcome = _report(request, run, gathered, notes=(_UNFINISHED,))
    if request.approve and outcome.verdict.green:
        gathered = _ask(request, run, gathered, outcome, stage)
        outcome = _report(request, run, gathered, notes=(_UNFINISHED,))
    if not outcome.verdict.green:
        kept = stage.folder if request.keep_stage else None
        if kept is None:
            stage.discard()
        raise NotPublishedError(replace(_report(request, run, gathered), stage=kept))
    run.phase("publish", lambda: call(publish, stage, durable=request.fsync))
    return _report(request, run, gathered)


def _ask(request: ExportRequest, run: Run, gathered: Gathered, outcome: Outcome, stage: Stage) -> Gathered:
    checked, found = read_listed(stage.folder), {}
    answer = run.phase("approval", lambda: ASKING.get()(outcome, request.approve_within))
    run.notes.append(f"Asked whether to publish: {answer.decision}; {answer.told}.")
    if answer.decision == "approve":
        nbytes = gathered.prepared.planned.nbytes
        found = run.phase("hold again", lambda: run.runner.call(digest_stage, stage.folder, request.workers), nbytes_read=nbytes)
    judged = Judged((*gathered.judged.results, judge_approval(answer, str(request.to), checked, found)))
    return replace(gathered, judged=judged)


def _write(run: Run, prepared: Prepared, stage: Stage, workers: int) -> None:
    planned, loaded = prepared.planned, prepared.loaded
    run.progress.start(planned.nbytes)
    with_helper = len(planned.files) < workers
    calls = [(loaded.ref, planned, stage, name, run.progress.advance, with_helper) for name, _ in planned.files]
    with one_torch_thread():
        run.runner.map(write_file, calls, workers)
    run.progress.stop()
    omissions = [(o.what, o.because) for o in planned.omissions]
    lineage = Lineage(run.run_id, run.started, run.environment, omissions, loaded.moment.consumed_tokens)
    run.runner.call(finish_release, loaded.ref, planned, stage, prepared.assets, lineage)


def _compare(request: ExportRequest, run: Run, prepared: Prepared, stage: Stage) -> Compared:
    if "logits" in request.skips:
        return Compared(reason=f"--skip: {request.skips['logits']}")
    if prepared.planned.config is None:
        return Compared(reason="no config to run the model with")
    tokenizer = prepared.assets if has_tokenizer(prepared.assets) and "tokenizer" not in request.skips else None
    return run.phase("logits", lambda: _run_logits(request, run, prepared, stage, tokenizer))


def _run_logits(request: ExportRequest, run: Run, prepared: Prepared, stage: Stage, tokenizer: Path | None) -> Compared:
    planned, loaded, call = prepared.planned, prepared.loaded, run.runner.call
    if planned.uncast is None:
        return call(
            compare_logits, loaded, planned, stage.folder, stage.folder, run.folder, request.golden, tokenizer, request.witness_memory
        )
    beside = stage.folder.with_name(f"{stage.folder.name}-uncast")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        merged = call(merge_uncast, loaded, planned, beside)
        return call(compare_logits, loaded, planned, stage.folder, merged, run.folder, request.golden, tokenizer, request.witness_memory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _report(request: ExportRequest, run: Run, gathered: Gathered, notes: tuple[str, ...] = ()) -> Outcome:
    planned, loaded, measured = gathered.prepared.planned, gathered.prepared.loaded, gathered.measured
    report = Report(
        run_id=run.run_id,
        kind="export",
        action="published",
        subject=str(request.to.absolute()),
        source=loaded.label,
        plan_digest=planned.digest,
        results=gathered.judged.results,
        witnesses=(*(measured.witnesses if measured else ()), *gathered.compared.witnesses),
        environment=run.environment,
        started=run.started,
        finished=now(),
        logits=gathered.compared.comparisons,
        tensors=read_statistics(measured.tensors) if measured else (),
        encoded=read_encoded(planned, measured) if measured else (),
        phases=tuple(run.phases),
        changes=planned.changes,
        omissions=(*planned.omissions, *(Omission(f"check {k}", v, "request") for k, v in request.skips.items())),
        notes=(*loaded.notes, *planned.notes, *run.notes, *notes),
        moment=loaded.moment,
        checkpoint=str(real_path(loaded.roots[0])),
    )
    if request.policy is not None and measured is not None:  # a plan that is refused never was a release
        report = apply_policy(report, read_policy(request.policy), datetime.now(UTC).date())
    return Outcome(report, write_report(report, run.folder, REQUIRED_CHECKS), report.verdict(REQUIRED_CHECKS))


def check_request(request: ExportRequest) -> None:
    """Raise for what the request alone shows to be wrong; reads nothing but the names of folders.

    Args:
        request: what to export.

    Raises:
        ReleaseError: the destination is taken or cannot be written, a path is missing or of the wrong kind, or a check is unknown.
    """
    refuse_paths(request)
    refuse_unknown_checks(request.skips, NAMED_AT_EXPORT)
    read_rules(request.quantize)
    if request.policy is not None:
        read_policy(request.policy)


def _refuse_unloadable(request: ExportRequest, planned: Planned) -> None:
    if planned.unloadable and "logits" not in request.skips:
        remedy = "Take int8 or fp8 for all of them; or, where the serving engine loads it, leave its logits out with --skip logits=REASON."
        raise RequestError(f"{planned.unloadable}; its logits cannot be compared", where="--quantize", remedy=remedy)


def _own_assets(source: Path, loaded: Loaded) -> Path | None:
    # In the checkpoint's folder, or between that and the folder asked for: a Trainer keeps the config above DeepSpeed's save.
    above = [folder for folder in loaded.roots[0].parents if folder.is_relative_to(source)]
    return next((folder for folder in (*loaded.roots, *above) if (folder / "config.json").is_file()), None)


def _check_space(stage: Stage, planned: Planned) -> None:
    written = sum(path.stat().st_size for path in stage.folder.iterdir() if path.is_file())
    needed, free = planned.nbytes - written, shutil.disk_usage(stage.folder).free
    if needed > free:
        raise RequestError(
            f"the release needs {needed:,} bytes more, the disk has {free:,}",
            where=str(stage.destination.parent),
            remedy="Free some space.",
        )


def _disk_full(destination: Path, nbytes: int, error: OSError) -> RequestError:
    return RequestError(
        f"{error.strerror} while {nbytes:,} bytes were written",
        where=str(destination.parent),
        remedy="Free some space (or raise the quota); nothing was left behind.",
    )


def _refusal(judged: Judged, outcome: Outcome) -> ReleaseError:
    broken = next((result for result in judged.failed() if result.status == "errored"), None)
    if broken is not None:
        return RequestError(
            f"check {broken.check} could not run: {broken.reason}",
            where=str(outcome.paths.html),
            remedy=f"Look at the files in --assets; to export without this check, --skip {broken.check}=REASON.",
        )
    first = next(f for result in judged.failed() for f in result.findings if f.severity == "error")
    others = sum(f.count for result in judged.failed() for f in result.findings if f.severity == "error") - first.count
    more = f" {others} more findings are in {outcome.paths.html}." if others else ""
    return RequestError(f"[{first.code}] expected {first.expected}, found {first.found}.", where=first.where, remedy=first.remedy + more)


@flow(
    name="export",
    flow_run_name="export {request.source.name}",
    validate_parameters=True,
    on_cancellation=[remove_what_is_staged],
    on_crashed=[say_how_to_go_on],
)
def export(request: ExportRequest) -> str:
    """Export a sharded checkpoint into verified, published release weights.

    Args:
        request: what to export.

    Returns:
        Path of the HTML report.
    """
    return show_ended(lambda: run_export(request, PrefectRunner(), Both(WATCHING.get(), ProgressArtifact())))


def run_export(request: ExportRequest, runner: Runner, progress: Progress) -> Outcome:
    """Export a checkpoint in a new run folder.

    Args:
        request: what to export.
        runner: how tasks are called.
        progress: told of bytes written.

    Returns:
        The outcome of a green run.
    """
    refuse_inside_source(request)
    run = Run.create("export", request.runs, runner, progress)
    try:
        with (
            reading(run.folder, [request.source, *request.also]),
            reporting_refusals(run, "export", "published", request.to, request.source),
        ):
            return export_line(request, run)
    finally:
        close_source()
