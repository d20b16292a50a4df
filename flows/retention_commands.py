"""`shardwright retain` and `ledger`: which of a run's saves are kept, and what there is of each."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.line import FAILED, GREEN, reader_may_leave
from flows.options import JsonOption, RunsOption
from flows.requests import default_runs

if TYPE_CHECKING:
    from flows.ledger import Ledger
    from flows.retention import Retained
    from reports.model import Report

RootArg = Annotated[Path, typer.Argument(help="The training run's root, with a folder per save.", show_default=False)]
LogOption = Annotated[Path | None, typer.Option(help="The trainer's log: JSON lines, trainer_state.json or CSV.", show_default=False)]
EvalsOption = Annotated[
    list[Path] | None, typer.Option(help="Evaluation results: a file, or a folder of them. May be repeated.", show_default=False)
]
_GOING_SHOWN, _KEPT_SHOWN, _REASONS_SHOWN, _ROWS_SHOWN, _CELL = 40, 12, 6, 40, 40


def retain(
    root: RootArg,
    policy: Annotated[Path | None, typer.Option(help="YAML of what to keep. [default: the last three]", show_default=False)] = None,
    log: LogOption = None,
    evals: EvalsOption = None,
    apply: Annotated[bool, typer.Option("--apply", help="Delete what the plan says.")] = False,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say which saves of a run may go and why; with --apply delete them. Only complete ones, never below two verified by drills.

    Nothing goes that a report, a pin or a running export names, nor the newest.

    Exit code 0: planned, or done. 1: something could not be deleted. 2: no plan could be made.

    Example: shardwright retain runs/ --policy retain.yaml --log train.jsonl
    """
    from flows.retention import RetainRequest
    from flows.retention import retain as retain_root

    request = RetainRequest.model_validate(
        {"root": root, "policy": policy, "log": log, "evals": evals or [], "apply": apply, "runs": runs or default_runs()}
    )
    retained = retain_root(request)
    with reader_may_leave():
        _print_json(retained) if as_json else _print(retained, applied=apply)
    return FAILED if retained.left else GREEN


def _print_json(retained: "Retained") -> None:
    report = {"report": str(retained.paths.html), "left": dict(retained.left), "freed_nbytes": retained.freed_nbytes}
    print(json.dumps({**asdict(retained.planned.plan), "pins": [asdict(pin) for pin in retained.planned.pins], **report}))


def _print(retained: "Retained", *, applied: bool) -> None:
    from reports.spell import spell_bytes, spell_unseen

    plan, left = retained.planned.plan, dict(retained.left)
    kept = plan.of("keep")
    for name in plan.unfinished:
        print(f"go    {spell_unseen(name)}  left by an interrupted run")
    for decisions, shown in ((plan.of("go"), _GOING_SHOWN), (plan.of("thin"), _GOING_SHOWN), (kept, _KEPT_SHOWN)):
        for decision in decisions[-shown:]:
            size = spell_bytes(decision.freed_nbytes or decision.nbytes)
            told = left.get(decision.name) or _spell_reasons(decision.because)
            print(f"{'left' if decision.name in left else decision.action:<5} {spell_unseen(decision.name)}  {size}  {told}")
        if len(decisions) > shown:
            print(f"{decisions[0].action:<5} … and {len(decisions) - shown} earlier; --json lists all")
    _print_findings(retained.report)
    going, thinned = (sum(decision.name not in left for decision in plan.of(action)) for action in ("go", "thin"))
    verb, told = ("gone", "given back") if applied else ("go", "would be given back; --apply deletes")
    print(f"{going} of {len(plan.decisions)} saves {verb}, {thinned} keep their weights only: {spell_bytes(retained.freed_nbytes)} {told}")
    print(f"report   {retained.paths.html}")


def _spell_reasons(because: Sequence[str]) -> str:
    # A save that a hundred reports name has a hundred reasons.
    more = f"; … and {len(because) - _REASONS_SHOWN} more reasons" if len(because) > _REASONS_SHOWN else ""
    return "; ".join(because[:_REASONS_SHOWN]) + more


def ledger(
    root: RootArg,
    log: LogOption = None,
    evals: EvalsOption = None,
    policy: Annotated[Path | None, typer.Option(help="The retention policy: tokens per step, spikes.", show_default=False)] = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Line up a run's saves, log, data versions, evaluations, exports and drills by step and tokens, and say where they disagree.

    Exit code 0: nothing disagrees. 1: something does. 2: there is nothing to line up.

    Example: shardwright ledger runs/ --log train.jsonl --evals evals/
    """
    from flows.ledger import LedgerRequest, make_ledger

    request = LedgerRequest.model_validate(
        {"root": root, "log": log, "evals": evals or [], "policy": policy, "runs": runs or default_runs()}
    )
    made = make_ledger(request)
    with reader_may_leave():
        _print_ledger_json(made) if as_json else _print_ledger(made)
    return GREEN if made.report.verdict().green else FAILED


def _print_ledger_json(made: "Ledger") -> None:
    findings = [asdict(found) for result in made.report.results for found in result.findings]
    rows, pins = [asdict(row) for row in made.rows], [asdict(pin) for pin in made.pins]
    print(json.dumps({"rows": rows, "findings": findings, "pins": pins, "report": str(made.paths.html)}))


def _print_ledger(made: "Ledger") -> None:
    from flows.ledger import COLUMNS, cells_of

    table = [COLUMNS, *(cells_of(row) for row in made.rows[-_ROWS_SHOWN:])]
    widths = [min(_CELL, max(len(row[column]) for row in table)) for column in range(len(COLUMNS))]
    for row in table:
        print("  ".join(_fit(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(made.rows) > _ROWS_SHOWN:
        print(f"… and {len(made.rows) - _ROWS_SHOWN} earlier; ledger.csv beside the report has all")
    _print_findings(made.report)
    for pin in made.pins:
        print(f"pin      steps {pin.before} and {pin.after}: {pin.because}")
    print(f"report   {made.paths.html}")


def _fit(cell: str, width: int) -> str:
    return cell.ljust(width) if len(cell) <= width else f"{cell[: width - 1]}…"


def _print_findings(report: "Report") -> None:
    for result in report.results:
        for found in result.findings:
            print(f"{found.severity:<8} {found.where}: [{found.code}] expected {found.expected}, found {found.found}")
            print(f"         {found.remedy}")


def add_commands(app: typer.Typer) -> None:
    """Register the commands.

    Args:
        app: the command line.
    """
    for command in (retain, ledger):
        app.command()(command)
