"""Write a report and its renderings into a run's folder, each file whole or not at all."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from reports.html import render_html
from reports.junit import render_junit
from reports.markdown import render_markdown
from reports.model import Report, report_to_json


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where a report's files lie."""

    json: Path
    html: Path
    markdown: Path
    junit: Path


def write_report(report: Report, folder: Path, required: frozenset[str] = frozenset()) -> ReportPaths:
    """Write report.json, report.html, report.md and report.xml, and what checks attached; earlier ones are replaced.

    The JSON comes first: should a rendering fail, what the run said is already safe.

    Args:
        report: any report.
        folder: the run's folder; made when absent.
        required: names of checks the policy does not let be skipped.

    Returns:
        The paths written.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = replace_text(folder / "report.json", report_to_json(report))
    for name, text in [item for result in report.results for item in result.attachments.items()]:
        assert name == Path(name).name, name
        replace_text(folder / name, text)
    return ReportPaths(
        json=stored,
        html=replace_text(folder / "report.html", render_html(report, required)),
        markdown=replace_text(folder / "report.md", render_markdown(report, required)),
        junit=replace_text(folder / "report.xml", render_junit(report, required)),
    )


def replace_text(path: Path, text: str) -> Path:
    """Write a text file so that a reader, or a crash, meets the old content or the new, never a part.

    Args:
        path: the file.
        text: its new content, written as UTF-8.

    Returns:
        `path`.

    Raises:
        OSError: the folder cannot be written; nothing of the attempt is left.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
