"""What a person sees in the terminal: a progress bar, a short summary, errors in one paragraph. Standard error shows progress and errors,
standard output the result.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from reports.encoded import sum_encodings
from reports.errors import name_some
from reports.model import LogitsComparison, Report

UNITS = ("bytes", "kB", "MB", "GB", "TB")


def format_bytes(nbytes: int) -> str:
    """Return a size for people, in powers of 1000.

    Args:
        nbytes: bytes.

    Returns:
        `1.3 GB`.
    """
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} bytes" if unit == 0 else f"{value:.3g} {UNITS[unit]}"


class ProgressBar:
    """A bar of bytes written, with rate and time left, on standard error; nothing when that is no terminal or `quiet`.

    Args:
        quiet: whether to show nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def start(self, total: int) -> None:
        """Show a new bar.

        Args:
            total: bytes.
        """
        self._task = self._bar.add_task("writing", total=total)

    def advance(self, nbytes: int) -> None:
        """Move the bar.

        Args:
            nbytes: bytes done since the last call.
        """
        if self._task is not None:
            self._bar.advance(self._task, nbytes)

    def stop(self) -> None:
        """Turn the bar into a line that says what comes next."""
        if self._task is not None:
            self._bar.update(self._task, description="checking")


def print_outcome(report: Report, folder: Path, *, required: frozenset[str], stage: Path | None, as_json: bool) -> None:
    """Print how a run ended; the last line is the path of the HTML report.

    Args:
        report: the run's report.
        folder: its run folder.
        required: checks that must not be skipped.
        stage: the staging folder that was kept.
        as_json: whether to print one JSON object instead.
    """
    verdict = report.verdict(required)
    page = folder / "report.html"
    if as_json:
        shown = {"green": verdict.green, "verdict": verdict.line, "mapping": report.mapping_line(), "to": report.subject}
        print(json.dumps({**shown, "report": str(page), "json": str(folder / "report.json"), "stage": str(stage) if stage else None}))
        return
    print(f"source   {report.source}")
    counts = {status: sum(r.status == status for r in report.results) for status in ("passed", "failed", "errored", "skipped")}
    print("checks   " + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
    for size in sum_encodings(report.encoded):
        sizes = f"{format_bytes(size.nbytes)} from {format_bytes(size.source_nbytes)}"
        print(f"stored   {size.name}: {size.weights} weights, {sizes}, largest error {size.worst:.3g}")
    for comparison in report.logits:
        print(f"logits   {_describe(comparison)}")
    for result in report.results:
        for finding in result.findings:
            more = f" ({finding.count} times)" if finding.count > 1 else ""
            print(f"{finding.severity:<8} {finding.where}: [{finding.code}] expected {finding.expected}, found {finding.found}{more}")
            if finding.severity == "error":
                print(f"         {finding.remedy}")
            elif finding.waived:
                print(f"         by {finding.waived}")
    for reason, names in _asked_to_leave_out(report).items():
        print(f"left out {name_some(names)}: {reason}")
    for note in report.notes:
        print(f"note     {note}")
    if report.has_mapping:
        print(report.mapping_line())
    print(f"{verdict.line}: {report.subject}" if verdict.green else verdict.line)
    if stage is not None:
        print(f"stage    {stage}")
    print(f"report   {page}")


def _asked_to_leave_out(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for omission in report.omissions:
        if omission.asked_by == "request":
            found.setdefault(omission.because, []).append(omission.what)
    return found


def _describe(comparison: LogitsComparison) -> str:
    kl, limit = comparison.metrics.get("mean_kl"), comparison.limits.get("mean_kl")
    numbers = "" if kl is None else f": mean KL {kl:.3g}" + ("" if limit is None else f", limit {limit:.3g}")
    return f"{comparison.name}, {comparison.candidate} against {comparison.reference}, {comparison.positions} positions{numbers}"
