"""The ledger of a training run: saves, log, results, exports and drills, lined up by step and consumed tokens. Reads metadata only."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter

from flows.run_folder import make_run_folder, now, versions
from flows.run_timeline import mark_run
from flows.training_run import TrainingRunRequest
from reports.errors import RequestError
from reports.model import CheckResult, Mark, Report
from reports.paths import real_path
from reports.write import ReportPaths, replace_text, write_report
from tasks.engine.formats.readers import check_folder
from tasks.ledger import gather_events, gather_saves
from validators.retention.evaluations import read_evaluations
from validators.retention.evidence import Pin
from validators.retention.ledger import LedgerRow, Sources, judge_ledger, line_up
from validators.retention.pins import LogSigns, find_signs, propose_pins

KIND = "ledger"
COLUMNS = ("step", "tokens", "saves", "loss", "data", "evaluations", "exports", "drills")


class LedgerRequest(TrainingRunRequest):
    """One ledger of a training run. Of its policy it takes `tokens_per_step`, and what is pinned."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The rows, the pins that the log is reason for, and the report."""

    rows: tuple[LedgerRow, ...]
    pins: tuple[Pin, ...]
    report: Report
    paths: ReportPaths


def make_ledger(request: LedgerRequest) -> Ledger:
    """Line up what there is of a run, and say where it disagrees.

    Args:
        request: where everything lies.

    Returns:
        The ledger; its rows are also in ledger.csv and ledger.json of the run folder.

    Raises:
        ReleaseError: a file cannot be read, or there is nothing to line up.
    """
    check_folder(request.root)
    root, started, begun = real_path(request.root), now(), perf_counter()
    policy = request.read_policy()
    log = request.read_log(policy)
    sources = Sources(gather_saves(root), log, read_evaluations(request.evals), gather_events(request.runs, root))
    signs = find_signs(log, policy)
    rows, pins = line_up(sources, policy.tokens_per_step), propose_pins(signs, policy)
    if not rows:
        raise RequestError(
            "holds no save, and nothing was made of one", where=str(root), remedy="Point at a folder with a folder per step."
        )
    run_id, folder = make_run_folder(KIND, request.runs)
    replace_text(folder / "ledger.csv", spell_csv(rows))
    replace_text(folder / "ledger.json", json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    report = Report(
        run_id=run_id,
        kind=KIND,
        action="lined up",
        subject=str(root),
        source=str(root),
        plan_digest="",
        results=(replace(_judge(rows, sources, signs), seconds=perf_counter() - begun),),
        witnesses=(),
        environment=versions(),
        started=started,
        finished=now(),
        timeline=(*_mark(sources, pins), *mark_run(signs, sources.events, sources.evaluations)),
    )
    return Ledger(rows, pins, report, write_report(report, folder))


def _judge(rows: Sequence[LedgerRow], sources: Sources, signs: LogSigns) -> CheckResult:
    findings = judge_ledger(rows, sources, signs.gaps)
    is_red = any(found.severity == "error" for found in findings)
    measured = {
        "rows": len(rows),
        "saves": len(sources.saves),
        "lines of the log": len(sources.log),
        "results": len(sources.evaluations),
        "exports, gates and drills": len(sources.events),
        "gaps in the log": len(signs.gaps),
        "spikes": len(signs.spikes),
        "switches of data": len(signs.switches),
    }
    return CheckResult(KIND, "failed" if is_red else "passed", tuple(findings), len(rows), measured)


def _mark(sources: Sources, pins: Sequence[Pin]) -> Iterator[Mark]:
    yield from (Mark("save", save.step, save.step, f"{save.name}: {save.state}") for save in sources.saves)
    yield from (Mark("pin", pin.before, pin.after, pin.because) for pin in pins)


def spell_csv(rows: Sequence[LedgerRow]) -> str:
    """Return a ledger as CSV.

    Args:
        rows: its rows.

    Returns:
        A header, and a line per row; several things of one cell are joined by "; ".
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(cells_of(row) for row in rows)
    return text.getvalue()


def cells_of(row: LedgerRow) -> tuple[str, ...]:
    """Return a row as texts.

    Args:
        row: of a ledger.

    Returns:
        One text per column.
    """
    return (
        str(row.step),
        "" if row.tokens is None else str(row.tokens),
        "; ".join(save.name if save.state == "complete" else f"{save.name} ({save.state})" for save in row.saves),
        "" if row.log is None or row.log.loss is None else f"{row.log.loss:.6g}",
        "" if row.log is None else row.log.data,
        "; ".join(f"{name} {value:g}" for one in row.evaluations for name, value in one.results.items()),
        "; ".join(f"{event.run_id} {'green' if event.green else 'red'}" for event in row.events if event.kind != "drill"),
        "; ".join(f"{event.run_id} {'green' if event.green else 'red'}" for event in row.events if event.kind == "drill"),
    )
