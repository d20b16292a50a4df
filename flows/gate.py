"""The gate: one verdict on a finished folder of weights, before anyone serves it. Nothing is written but the report."""

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prefect import flow

from flows.reading import reading
from flows.refusals import refuse_paths, refuse_unknown_checks
from flows.refused_sources import reporting_refusals
from flows.requests import GateRequest
from flows.run import Outcome, PrefectRunner, RedVerdictError, Run, Runner, show_ended
from flows.run_folder import now
from reports.errors import RequestError
from reports.model import Omission, Report
from reports.paths import real_path
from reports.write import ReportPaths, write_report
from tasks.check import check_folder, check_headers, measure_release, read_statistics
from tasks.compare_logits import compare_logits, merge_uncast
from tasks.gather import compare_recorded, describe_release, digest_files
from tasks.gguf_release import refuse_absent
from tasks.handover import Compared, Described, Judged, Loaded, ModelRequest, Planned, ReleaseFacts, SourceRef
from tasks.known import find_known, read_earlier, write_digests
from tasks.load_shards import load_shards
from tasks.logits_line import why_not_comparable
from tasks.prove import prove
from tasks.reference import is_earlier_release, moment_of_release, read_reference, weights_of
from tasks.reshard import reshard
from tasks.sources import close_source
from validators.check import has_tokenizer
from validators.checks import NAMED
from validators.policy import REQUIRED_CHECKS, UNQUANTIZED, Policy
from validators.policy_file import read_policy
from validators.release import open_release
from validators.review import apply_policy

_ONE_FILE = 10**15  # bytes per file of a plan that nobody writes


class RejectedError(RedVerdictError):
    """A check failed: the release is not accepted."""


def check_request(request: GateRequest) -> None:
    """Raise for what the request alone shows to be wrong; reads nothing but the names of files.

    Args:
        request: what to judge.

    Raises:
        ReleaseError: a path is missing or of the wrong kind, or a check is unknown.
    """
    refuse_paths(request)
    if request.weights == "retrained" and (request.against is None or not open_release(request.against).files):
        raise RequestError("needs --against with an earlier release: a folder of safetensors", where="--weights retrained")
    if request.changed_since is not None:
        read_earlier(request.changed_since)
    if open_release(request.release).is_gguf:
        refuse_absent(str(request.release))
        if request.prove:
            raise RequestError("plants its faults into safetensors, and this is GGUF", where="--prove", remedy="Gate it without --prove.")
    refuse_unknown_checks(request.skips, NAMED)
    _read_policy(request)


def _read_policy(request: GateRequest) -> Policy:
    return read_policy(request.policy) if request.policy is not None else Policy()


def gate_line(request: GateRequest, run: Run) -> Outcome:
    """Judge a release.

    Args:
        request: what to judge, and what to hold it against; `check_request` has passed it.
        run: how tasks are called, where the report goes.

    Returns:
        The outcome of a green run.

    Raises:
        RejectedError: a check failed.
        ReleaseError: the work could not be done.
    """
    policy = _read_policy(request)
    first, loaded = _open(request, run)
    if request.stop_early:
        judged = run.phase("check headers", lambda: run.runner.call(check_headers, first, request.skips, run.clock))
        if judged.failed():
            return _conclude(request, run, judged, first, loaded, policy)
    facts = _gather(request, run, first, loaded)
    judged = run.phase("check", lambda: run.runner.call(check_folder, facts, policy.suite, request.skips, run.clock))
    if request.prove:
        planted, roots = run.folder / "planted", loaded.roots if loaded else ()
        proof = run.phase("prove", lambda: run.runner.call(prove, facts, roots, request.skips, request.prove, planted))
        judged = Judged((*judged.results, proof))
    return _conclude(request, run, judged, facts, loaded, policy)


def _open(request: GateRequest, run: Run) -> tuple[ReleaseFacts, Loaded | None]:
    # What is known before a tensor is read.
    call, folder = run.runner.call, request.release.absolute()
    described = run.phase("describe", lambda: call(describe_release, folder, request.family, run.folder))
    is_earlier = _has_other_weights(request)
    loaded, planned = (None, None) if is_earlier else _plan_source(request, run, described)
    reference = _reference(request, loaded, is_earlier=is_earlier)
    if reference is None:
        return ReleaseFacts(described, planned), loaded
    call_reference = partial(call, read_reference, reference, request.against if is_earlier else None, run.folder, request.workers)
    return ReleaseFacts(described, planned, referred=run.phase("reference", call_reference)), loaded


def _has_other_weights(request: GateRequest) -> bool:
    if request.against is None or request.weights == "same":
        return False
    return request.weights == "retrained" or is_earlier_release(request.release, request.against)


def _reference(request: GateRequest, loaded: Loaded | None, *, is_earlier: bool) -> Path | None:
    if request.assets is not None:
        return request.assets.absolute()
    against = loaded.roots[0] if loaded else request.against
    has_config = against is not None and (is_earlier or (against / "config.json").is_file())
    return against.absolute() if against is not None and has_config else None


def _gather(request: GateRequest, run: Run, first: ReleaseFacts, loaded: Loaded | None) -> ReleaseFacts:
    # Everything that takes reading: digests, statistics, values, logits.
    call, described, planned = run.runner.call, first.described, first.planned
    roots, nbytes = loaded.roots if loaded else (), described.nbytes
    digests = run.phase("digest", lambda: call(digest_files, described.folder, request.workers), nbytes_read=nbytes)
    write_digests(run.folder, digests)
    known = None
    is_gguf = open_release(described.folder).is_gguf
    if is_gguf and request.changed_since is not None:
        run.notes.append("--changed-since: a GGUF file is always measured")
    elif request.changed_since is not None:
        known, said = find_known(request.changed_since, digests, planned, run.environment)
        run.notes.append(said)
    measure = partial(call, measure_release, described.folder, planned, roots, run.folder, request.workers, known)
    measured = run.phase("measure", measure, nbytes_read=nbytes)
    compared = run.phase("logits", lambda: _compare(request, run, described, loaded, planned))
    return replace(first, measured=measured, compared=compared, digests=digests)


def _conclude(request: GateRequest, run: Run, judged: Judged, facts: ReleaseFacts, loaded: Loaded | None, policy: Policy) -> Outcome:
    found = _report(request, run, judged, facts, loaded)
    outcome = _write(request, run, apply_policy(found, policy, datetime.now(UTC).date()))
    if not outcome.verdict.green:
        raise RejectedError(outcome)
    return outcome


def _plan_source(request: GateRequest, run: Run, described: Described) -> tuple[Loaded | None, Planned | None]:
    if request.against is None:
        return None, None
    ref = SourceRef(request.against.absolute(), (), request.step, tag=request.tag, weights=weights_of(described.folder))
    loaded = run.phase("load shards", lambda: run.runner.call(load_shards, ref, run.folder))
    assets = described.folder if described.has_config else None
    family = request.family if described.expected else "none"
    dtype = described.dtype if described.dtype in UNQUANTIZED else ""
    wanted = ModelRequest(assets, family, dtype, request.drops, described.holds_head, _ONE_FILE, described.kept, like=described.names)
    return loaded, run.phase("reshard", lambda: run.runner.call(reshard, loaded.ref, wanted, run.folder))


def _compare(request: GateRequest, run: Run, described: Described, loaded: Loaded | None, planned: Planned | None) -> Compared:
    call, folder = run.runner.call, described.folder
    if "logits" in request.skips:
        return Compared(reason=f"--skip: {request.skips['logits']}")
    if not described.has_config:
        return Compared(reason="no config to run the model with")
    if loaded is None or planned is None:
        if request.golden is None:
            return Compared(reason="nothing to compare with (--golden, --against)")
        return call(compare_recorded, described, run.folder, request.golden, request.witness_memory)
    tokenizer = folder if has_tokenizer(folder) and "tokenizer" not in request.skips else None
    is_merged = planned.uncast is None and not open_release(folder).is_gguf
    needs_none = is_merged or bool(why_not_comparable(folder))  # nothing is merged for what will not be compared
    merged = folder if needs_none else call(merge_uncast, loaded, planned, run.folder / "merged")
    try:
        return call(compare_logits, loaded, planned, folder, merged, run.folder, request.golden, tokenizer, request.witness_memory)
    finally:
        if merged != folder:
            shutil.rmtree(merged)


def _report(request: GateRequest, run: Run, judged: Judged, facts: ReleaseFacts, loaded: Loaded | None) -> Report:
    planned, measured, compared = facts.planned, facts.measured, facts.compared
    return Report(
        run_id=run.run_id,
        kind="gate",
        action="accepted",
        subject=str(request.release.absolute()),
        source=_source_label(request, loaded),
        plan_digest=planned.digest if planned else "",
        results=judged.results,
        witnesses=(*(measured.witnesses if measured else ()), *compared.witnesses),
        environment=run.environment,
        started=run.started,
        finished=now(),
        logits=compared.comparisons,
        tensors=read_statistics(measured.tensors) if measured else (),
        phases=tuple(run.phases),
        omissions=tuple(Omission(f"check {check}", reason, "request") for check, reason in request.skips.items()),
        notes=(*(loaded.notes if loaded else ()), *run.notes),
        checkpoint=str(real_path(loaded.roots[0])) if loaded else "",
        moment=loaded.moment if loaded else moment_of_release(request.release),
    )


def _source_label(request: GateRequest, loaded: Loaded | None) -> str:
    if loaded is not None:
        return loaded.label
    return "none given" if request.against is None else f"{request.against.absolute()} (an earlier release, other weights)"


def _write(request: GateRequest, run: Run, report: Report) -> Outcome:
    paths = write_report(report, run.folder, REQUIRED_CHECKS)
    _hand_out(request, paths)
    return Outcome(report, paths, report.verdict(REQUIRED_CHECKS))


def _hand_out(request: GateRequest, paths: ReportPaths) -> None:
    # To where a CI service looks: its JUnit file, a folder it keeps, the summary of the step (GitHub names the file in the environment).
    if request.report is not None:
        request.report.mkdir(parents=True, exist_ok=True)
        for path in (paths.json, paths.html, paths.markdown, paths.junit):
            shutil.copyfile(path, request.report / path.name)
    if request.junit is not None:
        request.junit.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(paths.junit, request.junit)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(paths.markdown.read_text(encoding="utf-8") + "\n")


@flow(name="release gate", flow_run_name="gate {request.release.name}", validate_parameters=True)
def release_gate(request: GateRequest) -> str:
    """Judge a finished folder of release weights: one verdict.

    Args:
        request: what to judge, and what to hold it against.

    Returns:
        Path of the HTML report.
    """
    return show_ended(lambda: run_gate(request, PrefectRunner()))


def run_gate(request: GateRequest, runner: Runner) -> Outcome:
    """Judge a release in a new run folder.

    Args:
        request: what to judge.
        runner: how tasks are called.

    Returns:
        The outcome of a green run.
    """
    check_request(request)
    run = Run.create("gate", request.runs, runner)
    try:
        with (
            reading(run.folder, [request.release, *([request.against] if request.against else [])]),
            reporting_refusals(run, "gate", "accepted", request.release, request.against),
        ):
            return gate_line(request, run)
    finally:
        close_source()
