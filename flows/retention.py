"""Retention of a run's saves: plan, tell, and with `--apply` delete. No Prefect: a dry run of ten thousand saves takes seconds."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from types import MappingProxyType

from pydantic import Field

from flows.run_folder import make_run_folder, now, versions
from flows.run_timeline import mark_run
from flows.training_run import TrainingRunRequest
from reports.codes import finding
from reports.errors import RequestError, name_some
from reports.model import CheckResult, Fate, Finding, Mark, Report
from reports.paths import real_path
from reports.spell import spell_bytes
from reports.write import ReportPaths, replace_text, write_report
from tasks.claims import OWN_KIND
from tasks.engine.formats.readers import check_folder
from tasks.ledger import gather_events
from tasks.retain import Planned, apply_plan, plan_root, put_back
from validators.retention.evaluations import Evaluation, read_evaluations
from validators.retention.evidence import Action, Decision
from validators.retention.pins import list_unlogged
from validators.retention.plan import spell_excess
from validators.retention.policy import RetentionPolicy
from validators.retention.training_log import LogLine

# What becomes of a save → how a page says so
BECOMES: Mapping[Action, str] = MappingProxyType({"keep": "kept", "go": "goes", "thin": "weights only"})
DONE: Mapping[Action, str] = MappingProxyType({"keep": "kept", "go": "gone", "thin": "weights only"})
STILL_THERE = "still there"


class PlanRequest(TrainingRunRequest):
    """One plan of what is kept of a training run's saves."""


class RetainRequest(PlanRequest):
    """A plan, and whether to act on it."""

    apply: bool = Field(False, description="Delete what the plan says. Default: only say it.")


@dataclass(frozen=True, slots=True)
class Retained:
    """How it ended: the plan, what was not done although planned, and the report."""

    planned: Planned
    left: tuple[tuple[str, str], ...]
    report: Report
    paths: ReportPaths

    @property
    def freed_nbytes(self) -> int:
        """Bytes that were given back, or would be."""
        return _sum_freed(self.planned, self.left)


def retain(request: RetainRequest) -> Retained:
    """Plan what is kept, write the plan down, and delete the rest if asked to.

    Args:
        request: what to keep, and whether to act.

    Returns:
        The plan and the report.

    Raises:
        ReleaseError: the root holds no save, or a file of the request is malformed.
    """
    check_folder(request.root)
    root = real_path(request.root)
    if real_path(request.runs).is_relative_to(root):
        raise RequestError("lies inside the run", where=f"--runs {request.runs}", remedy="Choose another --runs.")
    if request.apply and request.policy is None:
        raise RequestError(
            "deletes nothing without a policy", where="--apply", remedy="Write what to keep into a file, and name it by --policy."
        )
    policy = request.read_policy()
    log = request.read_log(policy)
    started, begun = now(), perf_counter()
    evaluations = read_evaluations(request.evals)
    again = put_back(root, request.runs) if request.apply else ()
    planned = plan_root(root, policy, log, request.runs, evaluations)
    marks = tuple(mark_run(planned.signs, gather_events(request.runs, root), evaluations))
    run_id, folder = make_run_folder(OWN_KIND, request.runs)
    replace_text(folder / "plan.json", json.dumps({**asdict(planned.plan), "policy": policy.model_dump(mode="json")}, indent=1) + "\n")
    left = apply_plan(root, planned, request.runs) if request.apply else ()
    words = DONE if request.apply else BECOMES
    result = replace(_judge(planned, policy, log, evaluations, left), seconds=perf_counter() - begun)
    report = Report(
        run_id=run_id,
        kind=OWN_KIND,
        action="retained as planned" if request.apply else "planned, nothing was deleted",
        subject=str(root),
        source=str(root),
        plan_digest="",
        results=(result,),
        witnesses=(),
        environment=versions(),
        started=started,
        finished=now(),
        fates=tuple(_tell(decision, dict(left), words) for decision in planned.plan.decisions),
        timeline=(*_mark_saves(planned, dict(left), words), *marks),
        notes=(*_spell_given(request, len(planned.settled)), *_spell_leftovers(planned, again)),
    )
    return Retained(planned, left, report, write_report(report, folder))


def _spell_given(request: RetainRequest, settled: int) -> Iterator[str]:
    # What the plan was made of, for whoever asks later.
    if request.policy is not None:
        digest = hashlib.sha256(request.policy.read_bytes()).hexdigest()
        yield f"policy: {request.policy.absolute()}, sha256 {digest}; as read, in plan.json"
    for option, paths in {"log": [request.log] if request.log else [], "evaluations": request.evals}.items():
        yield f"{option}: {', '.join(str(path.absolute()) for path in paths) or 'none given'}"
    yield f"who names saves was looked up below {request.runs.absolute()}, in reports ({settled}) and in runs that are going on"


def _spell_leftovers(planned: Planned, again: tuple[str, ...]) -> Iterator[str]:
    yield from (f"{name}: renamed by an interrupted run and still whole; it has its name back" for name in again)
    yield from (f"{name}: left by an interrupted run; --apply finishes it, or gives it its name back" for name in planned.plan.unfinished)


def _mark_saves(planned: Planned, left: Mapping[str, str], words: Mapping[Action, str]) -> tuple[Mark, ...]:
    marks = []
    for one in sorted(planned.plan.decisions, key=lambda decision: list(BECOMES).index(decision.action)):
        fate = _tell(one, left, words)
        marks.append(Mark(fate.becomes, one.step, one.step, f"{one.name}, {spell_bytes(one.nbytes)}: {fate.because}"))
    return (*marks, *(Mark("pin", pin.before, pin.after, pin.because) for pin in planned.pins))


def _tell(decision: Decision, left: Mapping[str, str], words: Mapping[Action, str]) -> Fate:
    if decision.name in left:
        return Fate(decision.name, decision.nbytes, STILL_THERE, left[decision.name])
    return Fate(decision.name, decision.nbytes, words[decision.action], "; ".join(decision.because))


def _judge(
    planned: Planned,
    policy: RetentionPolicy,
    log: Sequence[LogLine],
    evaluations: Sequence[Evaluation],
    left: tuple[tuple[str, str], ...],
) -> CheckResult:
    plan = planned.plan
    findings = [finding("retention.left", name, expected="gone", found=why) for name, why in left]
    if plan.blocked:
        findings.append(finding("retention.unverified", plan.root, expected="two verified saves", found=plan.blocked))
    incomplete = [save.name for save in planned.saves if not save.is_complete and not save.is_thinned]
    unplaced = [one.where for one in evaluations if one.step is None]
    unlogged = list_unlogged(planned.saves, log, policy)
    findings += _folded("retention.incomplete", incomplete, "whole saves", "not whole")
    findings += _folded(
        "retention.backward", list(plan.backward), "saves written in the order of their steps", "written before an earlier step"
    )
    findings += _folded("retention.unplaced", unplaced, "results of a step", "that tell of none, and hold no save")
    findings += _folded("retention.unlogged", unlogged, "a log with the loss of every stretch", "of which the log says nothing")
    findings += _folded(
        "retention.not-thinned",
        [d.name for d in plan.decisions if d.unthinnable],
        "whole weights in files of their own",
        "without",
    )
    over = spell_excess(plan, policy)
    if over:
        findings.append(finding("retention.over-budget", plan.root, expected=f"at most {spell_bytes(policy.budget_nbytes)}", found=over))
    measured = {
        "saves": len(plan.decisions),
        "kept": len(plan.of("keep")),
        "thinned": len(plan.of("thin")),
        "going": len(plan.of("go")),
        "bytes given back": _sum_freed(planned, left),
        "bytes kept": sum(d.nbytes for d in plan.decisions) - _sum_freed(planned, left),
        "pins from the log": len(planned.pins),
    }
    return CheckResult("retention", "failed" if left else "passed", tuple(findings), max(1, len(plan.decisions)), measured)


def _sum_freed(planned: Planned, left: tuple[tuple[str, str], ...]) -> int:
    return sum(decision.freed_nbytes for decision in planned.plan.decisions if decision.name not in dict(left))


def _folded(code: str, names: Sequence[str], expected: str, found: str) -> list[Finding]:
    return [finding(code, name_some(names), expected=expected, found=f"{len(names)} {found}")] if names else []
