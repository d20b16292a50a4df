"""What a person sees in the terminal: a progress bar, a short summary, errors in one paragraph. Standard error shows progress and errors,
standard output the result.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from reports.model import Report, Verdict
from reports.text import summary_lines


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
        print(json.dumps(_as_json(report, folder, verdict, stage)))
        return
    for line in summary_lines(report, required):
        print(line)
    if stage is not None:
        print(f"stage    {stage}")
    print(f"report   {page}")


def _as_json(report: Report, folder: Path, verdict: Verdict, stage: Path | None) -> dict[str, object]:
    findings = [
        {"check": result.check, "code": finding.code, "severity": finding.severity, "where": finding.where}
        for result in report.results
        for finding in result.findings
    ]
    return {
        "kind": report.kind,
        "green": verdict.green,
        "verdict": verdict.line,
        **({"mapping": report.mapping_line()} if report.has_mapping else {}),
        "findings": findings,
        "to": report.subject,
        "report": str(folder / "report.html"),
        "json": str(folder / "report.json"),
        "stage": str(stage) if stage else None,
    }
