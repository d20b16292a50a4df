"""Retention of a run's saves: plan, tell, and with `--apply` delete. No Prefect: a dry run of ten thousand saves takes seconds."""

import json
from dataclasses import asdict, dataclass, replace
from time import perf_counter

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
from tasks.retain import Planned, apply_plan, plan_root
from validators.retention.evaluations import read_evaluations
from validators.retention.evidence import Decision
from validators.retention.plan import spell_excess
from validators.retention.policy import RetentionPolicy

# What becomes of a save → how a page says so
BECOMES = {"keep": "kept", "go": "goes", "thin": "weights only"}
DONE = {"keep": "kept", "go": "gone", "thin": "weights only"}


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
    policy = request.read_policy()
    log = request.read_log(policy)
    if policy.every_tokens and not (policy.tokens_per_step or any(line.consumed for line in log)):
        raise RequestError("needs tokens", where="every_tokens", remedy="Give a --log that counts them, or tokens_per_step.")
    started, begun = now(), perf_counter()
    evaluations = read_evaluations(request.evals)
    planned = plan_root(root, policy, log, request.runs, evaluations)
    run_id, folder = make_run_folder(OWN_KIND, request.runs)
    replace_text(folder / "plan.json", json.dumps(asdict(planned.plan), indent=1) + "\n")
    left = apply_plan(root, planned, request.runs) if request.apply else ()
    result = replace(_judge(planned, policy, left), seconds=perf_counter() - begun)
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
        fates=tuple(_tell(decision, dict(left), DONE if request.apply else BECOMES) for decision in _going_first(planned)),
        timeline=(*_mark_saves(planned), *mark_run(log, policy, gather_events(request.runs, root), evaluations)),
        notes=tuple(f"{name}: left half-deleted by an interrupted run, goes first" for name in planned.plan.unfinished),
    )
    return Retained(planned, left, report, write_report(report, folder))


def _mark_saves(planned: Planned) -> tuple[Mark, ...]:
    rows = sorted(planned.plan.decisions, key=lambda decision: list(BECOMES).index(decision.action))
    return tuple(
        Mark(BECOMES[one.action], one.step, one.step, f"{one.name}, {spell_bytes(one.nbytes)}: {'; '.join(one.because)}") for one in rows
    ) + tuple(Mark("pin", pin.before, pin.after, pin.because) for pin in planned.pins)


def _going_first(planned: Planned) -> list[Decision]:
    return sorted(planned.plan.decisions, key=lambda decision: (decision.action == "keep", decision.step))


def _tell(decision: Decision, left: dict[str, str], words: dict[str, str]) -> Fate:
    if decision.name in left:
        return Fate(decision.name, decision.nbytes, "still there", left[decision.name])
    return Fate(decision.name, decision.nbytes, words[decision.action], "; ".join(decision.because))


def _judge(planned: Planned, policy: RetentionPolicy, left: tuple[tuple[str, str], ...]) -> CheckResult:
    plan = planned.plan
    findings = [finding("retention.left", name, expected="gone", found=why) for name, why in left]
    if plan.blocked:
        findings.append(finding("retention.unverified", plan.root, expected="two verified saves", found=plan.blocked))
    findings += _folded("retention.incomplete", [save.name for save in planned.saves if not save.is_complete], "a whole save")
    findings += _folded(
        "retention.not-thinned", [d.name for d in plan.decisions if any("weights_only" in why for why in d.because) and d.action == "keep"]
    )
    over = spell_excess(plan, policy)
    if over:
        findings.append(finding("retention.over-budget", plan.root, expected=f"at most {spell_bytes(policy.budget_nbytes)}", found=over))
    measured = {
        "saves": len(plan.decisions),
        "kept": len(plan.of("keep")),
        "thinned": len(plan.of("thin")),
        "going": len(plan.of("go")),
        "bytes given back": plan.freed_nbytes,
        "bytes kept": sum(d.nbytes - d.freed_nbytes for d in plan.decisions),
        "pins from the log": len(planned.pins),
    }
    return CheckResult("retention", "failed" if left else "passed", tuple(findings), max(1, len(plan.decisions)), measured)


def _folded(code: str, names: list[str], expected: str = "files of its own for the training state") -> list[Finding]:
    return [finding(code, name_some(names), expected=expected, found=f"{len(names)} that are not")] if names else []
