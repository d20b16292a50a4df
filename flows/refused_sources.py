"""The report of a run that ended because the checkpoint itself shows that no release can be made of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.run import Run
from flows.run_folder import now
from reports.errors import ReleaseError
from reports.model import Report
from reports.write import write_report
from validators.refusal import judge_refusal


@contextmanager
def reporting_refusals(run: Run, kind: str, action: str, subject: Path, source: Path | None) -> Iterator[None]:
    """Write a report when a refusal with a code of its own ends the block; the refusal goes on, with a note of where the report is.

    Args:
        run: the run.
        kind: the report's.
        action: what a green run has done.
        subject: the release.
        source: the checkpoint.

    Yields:
        Nothing.
    """
    try:
        yield
    except ReleaseError as refused:
        if refused.code:
            report = Report(
                run_id=run.run_id,
                kind=kind,
                action=action,
                subject=str(subject.absolute()),
                source=str(source.absolute()) if source else "none given",
                plan_digest="",
                results=(judge_refusal(refused),),
                witnesses=(),
                environment=run.environment,
                started=run.started,
                finished=now(),
                phases=tuple(run.phases),
                notes=tuple(run.notes),
            )
            refused.add_note(f"report   {write_report(report, run.folder).html}, {refused.code}")
        raise
