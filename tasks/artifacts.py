"""What a run shows in Prefect: a summary per check, a table of findings, the report's verdict with its path, and progress in bytes.

Summaries and the first findings only: everything shown lands in Prefect's database and in the browser. The whole is in the run's folder.
Called inside flow runs only; elsewhere Prefect has no run to hang an artifact on, and says so.

Source: prefect 3.9. Keys take `[a-z0-9-]` only. A table cell that is NaN becomes null, so every cell here is text or a count. The older
page renders cells as Markdown, the newer one as plain text: names stand in code spans, which read well in both.
"""

import base64
import contextvars
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from reports.errors import ReleaseError
from reports.html import draw_trends
from reports.markdown import code_span, render_check, render_markdown, shorten
from reports.model import CheckResult, Finding, Report
from reports.spell import spell_bytes
from reports.svg import stand_alone
from reports.write import ReportPaths

MAX_FINDINGS = 200
UPDATE_SECONDS = 1.0
_MAX_KEY_CHARS = 100
_log = logging.getLogger(__name__)


def show_check(result: CheckResult) -> UUID:
    """Show one check's summary, under the key `check-<name>`.

    Args:
        result: what the check said.

    Returns:
        The artifact's id.
    """
    return cast(
        "UUID",
        create_markdown_artifact(
            markdown=render_check(result),
            key=artifact_key(f"check-{result.check}"),
            description=f"{result.check}: {result.status}",
        ),
    )


def show_findings(results: Sequence[CheckResult]) -> UUID:
    """Show the findings of all checks as one table, errors first, under the key `findings`.

    Args:
        results: what the checks said.

    Returns:
        The artifact's id.
    """
    found = sorted(((r.check, f) for r in results for f in r.findings), key=lambda pair: pair[1].severity != "error")
    rows = [_row(check, finding) for check, finding in found[:MAX_FINDINGS]]
    more = len(found) - len(rows)
    described = f"{len(found)} finding{'' if len(found) == 1 else 's'}" + (
        f", the first {len(rows)} shown; all are in report.json" if more else ""
    )
    return cast("UUID", create_table_artifact(table=rows, key="findings", description=described))


def show_report(report: Report, paths: ReportPaths, required: frozenset[str] = frozenset()) -> UUID:
    """Show the verdict, the summary and where the report's page lies, under the key `report`.

    A browser follows no link from a server's page to a local file: the path is text to copy.

    Args:
        report: the run's report.
        paths: where it was written.
        required: names of checks the policy does not let be skipped.

    Returns:
        The artifact's id.
    """
    verdict = report.verdict(required)
    page = f"\nFull report: {code_span(str(paths.html))}\n"
    return cast(
        "UUID",
        create_markdown_artifact(
            markdown=render_markdown(report, required) + page,
            key="report",
            description=shorten(verdict.line),
        ),
    )


def show_fates(report: Report) -> UUID:
    """Show what becomes of each save of a run, and why, as a table under the key `plan`.

    Args:
        report: a report of retention.

    Returns:
        The artifact's id.
    """
    rows = [
        {"save": code_span(shorten(f.save)), "becomes": f.becomes, "size": spell_bytes(f.nbytes), "because": code_span(shorten(f.because))}
        for f in sorted(report.fates, key=lambda fate: fate.becomes == "kept")[:MAX_FINDINGS]
    ]
    more = len(report.fates) - len(rows)
    described = f"{len(report.fates)} saves" + (f", the first {len(rows)} shown; all are in report.json" if more else "")
    return cast("UUID", create_table_artifact(table=rows, key="plan", description=described))


def show_trends(report: Report) -> list[UUID]:
    """Show how a drill's numbers moved from run to run, as a picture each, under keys `trend-<number>`; none for a first drill.

    Args:
        report: a drill's report.

    Returns:
        The artifacts' ids.
    """
    shown = []
    for name, chart in draw_trends(report.history):
        picture = base64.b64encode(stand_alone(chart).encode()).decode()
        address = f"data:image/svg+xml;base64,{picture}"
        shown.append(cast("UUID", create_image_artifact(image_url=address, key=artifact_key(f"trend-{name}"), description=name)))
    return shown


def show_refusal(error: ReleaseError) -> UUID:
    """Show what stood in the way, where, and what to do, under the key `report`.

    Args:
        error: why the work could not be done.

    Returns:
        The artifact's id.
    """
    lines = [f"## Not done: {code_span(shorten(error.what))}", f"Where: {code_span(error.where)}" if error.where else "", error.remedy]
    return cast(
        "UUID",
        create_markdown_artifact(markdown="\n\n".join(filter(None, lines)), key="report", description=shorten(f"not done: {error}")),
    )


def artifact_key(name: str) -> str:
    """Return a key that Prefect takes.

    Args:
        name: any text.

    Returns:
        Lower-case letters, digits and dashes; `unnamed` when nothing of `name` is left.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_MAX_KEY_CHARS] or "unnamed"


class ProgressArtifact:
    """Progress in bytes, shown in Prefect at most once per `UPDATE_SECONDS`. Safe to advance from several threads.

    The thread that passes the second sends the update; others never wait for it. Should the server not answer, one warning is logged
    and no more is sent: progress is never a reason for an export to fail.

    Args:
        key: the artifact's key.
        clock: seconds that only grow.
    """

    def __init__(self, key: str = "written", clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = artifact_key(key), clock
        self._artifact: UUID | None = None  # none before the start, after the stop, and when the server does not answer
        self._total, self._done, self._sent_at = 0, 0, 0.0
        self._counting, self._sending = threading.Lock(), threading.Lock()
        self._context = contextvars.copy_context()

    def start(self, total: int) -> None:
        """Show the artifact at 0 %.

        Args:
            total: how many bytes will be written.
        """
        self._context = contextvars.copy_context()  # threads without the run's context would look for another server
        with self._counting:
            self._total, self._done, self._sent_at = total, 0, self._clock()
            self._artifact = cast("UUID", create_progress_artifact(progress=0.0, key=self._key, description="bytes written"))

    def advance(self, nbytes: int) -> None:
        """Count bytes as written, and show it when it is time.

        Args:
            nbytes: how many more.
        """
        with self._counting:
            self._done += nbytes
            now = self._clock()
            if now - self._sent_at < UPDATE_SECONDS:
                return
            self._sent_at = now
        if self._sending.acquire(blocking=False):
            try:
                self._context.run(self._send)
            finally:
                self._sending.release()

    def stop(self) -> None:
        """Show the share reached; nothing is shown afterwards."""
        with self._sending:
            self._context.run(self._send)
            self._artifact = None

    def percent(self) -> float:
        """Return the share written.

        Returns:
            0 to 100; 100 when there is nothing to write.
        """
        return min(100.0, 100.0 * self._done / self._total) if self._total else 100.0

    def _send(self) -> None:
        if self._artifact is None:
            return
        try:
            update_progress_artifact(self._artifact, self.percent())
        except httpx.HTTPError as error:
            self._artifact = None
            _log.warning("Progress is no longer shown in Prefect: %s", error)


def _row(check: str, finding: Finding) -> dict[str, str | int]:
    return {
        "severity": finding.severity,
        "check": code_span(check),
        "code": code_span(finding.code),
        "where": code_span(shorten(finding.where)),
        "expected": code_span(shorten(finding.expected)),
        "found": code_span(shorten(finding.found)),
        "count": finding.count,
        "what to do": code_span(shorten(finding.remedy)),
    }
