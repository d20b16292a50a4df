"""Planted faults of a run's records, and the code of the ledger that must say so."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.export import run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from tests.builders.long_run import EVERY, GAP, LAST, TOKENS, write_log, write_save


@dataclass(frozen=True)
class LedgerFault:
    """A way that the records of tests.builders.long_run disagree; `also` are codes that come with it."""

    name: str
    code: str
    plant: Callable[[Path], object]
    also: tuple[str, ...] = ()


def edit_log(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Change every line of the log."""

    def plant(base: Path) -> None:
        rows = [json.loads(line) for line in (base / "log.jsonl").read_text().splitlines()]
        for row in rows:
            change(row)
        (base / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return plant


def edit_result(name: str, **changed: object) -> Callable[[Path], object]:
    """Change what an evaluation says of itself."""

    def plant(base: Path) -> None:
        path = base / "evals" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return plant


def _forget_tokens_at_300(row: dict) -> None:
    # A restart between saves that begins to count at zero, for one step.
    if row["step"] == 301:
        row["consumed_tokens"] = TOKENS


def save_with_other_tokens(base: Path) -> None:
    """As if the trainer's counter had missed a step."""
    shutil.rmtree(base / "run" / "step-100")
    write_save(base / "run" / "step-100", 100, tokens=99 * TOKENS)


def count_by_rank(base: Path) -> None:
    """As torchtitan does on two ranks: the log sums over both, a save holds the count of one; that at step 100 missed a step."""
    edit_log(lambda row: row.update(consumed_tokens=2 * row["consumed_tokens"]))(base)
    for path in (base / "evals").glob("*00.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens": 0}))
    for step in range(EVERY, LAST + 1, EVERY):
        shutil.rmtree(base / "run" / f"step-{step}")
        write_save(base / "run" / f"step-{step}", step, tokens=99 * TOKENS if step == 100 else None, ranks=2)


def go_back_to_550(base: Path) -> None:
    """The run went back to step 550 and came to 580; what the log has of 581 to 600 is of the run that it gave up."""
    lines = (base / "log.jsonl").read_text().splitlines()
    again = [line for line in lines if 550 < json.loads(line)["step"] <= 580]
    (base / "log.jsonl").write_text("\n".join([*lines, *again]) + "\n")


def save_under_another_number(base: Path) -> None:
    """Copied by hand, a number mistyped; the log knows both steps."""
    shutil.rmtree(base / "run" / "step-125")
    (base / "run" / "step-100").rename(base / "run" / "step-125")


def export_before_it_was_saved_again(base: Path) -> None:
    """The run went back, and came to the same step with another batch size; what was exported is of the first time."""
    save = base / "run" / "step-100"
    shutil.rmtree(save)
    write_save(save, 100, tokens=50 * TOKENS)
    run_export(ExportRequest(source=save, to=base / "release", family="none", runs=base / "runs"), PlainRunner(), Silent())
    shutil.rmtree(save)
    write_save(save, 100)


FAULTS: tuple[LedgerFault, ...] = (
    LedgerFault(
        "log_of_a_stretch_lost", "ledger.log-gap", lambda base: write_log(base / "log.jsonl", skip=GAP), also=("ledger.not-logged",)
    ),
    LedgerFault("save_of_a_stretch_not_logged", "ledger.not-logged", lambda base: write_log(base / "log.jsonl", skip=range(590, 601))),
    LedgerFault("counter_falls_back_to_zero", "ledger.tokens-fall", edit_log(_forget_tokens_at_300)),
    LedgerFault("counter_in_a_save_missed_a_step", "ledger.tokens-differ", save_with_other_tokens),
    LedgerFault("counter_of_one_rank_missed_a_step", "ledger.tokens-differ", count_by_rank),
    LedgerFault("log_that_ends_early_after_it_went_back", "ledger.not-logged", go_back_to_550),
    LedgerFault("save_copied_under_another_number", "ledger.step-differs", save_under_another_number, also=("ledger.tokens-differ",)),
    LedgerFault("export_of_a_save_that_was_made_again", "ledger.tokens-differ", export_before_it_was_saved_again),
    LedgerFault("evaluation_of_other_tokens", "ledger.tokens-differ", edit_result("200.json", tokens=1)),
    LedgerFault("evaluation_of_other_data", "ledger.data-differs", edit_result("400.json", data="web-1")),
    LedgerFault("evaluated_save_gone", "ledger.save-gone", lambda base: shutil.rmtree(base / "run" / "step-200")),
    LedgerFault("results_of_no_step", "ledger.unplaced", edit_result("results_2026-01-01.json", config={"model_args": "pretrained=/out"})),
)
