"""What the commands share: running a flow with its progress, and showing how it ended. Imports Prefect only inside."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

GREEN, FAILED = 0, 1
R = TypeVar("R", bound=BaseModel)
Line = tuple[Callable[[R], None], Callable[[R], str]]  # what refuses a request at once, and the flow


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let whoever reads our output leave: `| head -1` closes the pipe, what was done stays done, and so does its exit code.

    Yields:
        Nothing.
    """
    try:
        yield
        if sys.stdout is not None:  # closed by `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_flow(request: R, load: Callable[[], Line[R]], *, runs_model: bool, as_json: bool) -> int:
    """Run a flow, show its outcome.

    Args:
        request: what it is asked.
        load: imports what refuses a request at once, and the flow.
        runs_model: whether it will run a model, whose libraries then load beside the server's start.
        as_json: whether to print one JSON object.

    Returns:
        The exit code.
    """
    from flows.server import await_prefect, prepare_prefect

    prepare_prefect()
    from flows.refusals import refuse_paths  # most mistakes are in paths: said before the slow imports

    refuse_paths(request)
    with _imports_uncollected():
        from flows.run import RedVerdictError, watched_by
        from flows.terminal import ProgressBar
        from tasks.forward import preload

        check_request, flow = load()
        check_request(request)
        if runs_model:
            preload()
    await_prefect()
    try:
        with ProgressBar(quiet=as_json) as bar, watched_by(bar):
            page = Path(flow(request))
    except RedVerdictError as red:
        _show(red.outcome.paths.html, as_json=as_json, stage=red.outcome.stage)
        return FAILED
    _show(page, as_json=as_json, stage=None)
    return GREEN


@contextmanager
def _imports_uncollected() -> Iterator[None]:
    # Modules live as long as the process: looking for garbage among them costs a fifth of the imports' time.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _show(page: Path, *, as_json: bool, stage: Path | None) -> None:
    from flows.terminal import print_outcome
    from reports.model import report_from_json
    from validators.policy import REQUIRED_CHECKS

    report = report_from_json((page.parent / "report.json").read_text(encoding="utf-8"))
    with reader_may_leave():
        print_outcome(report, page.parent, required=REQUIRED_CHECKS, stage=stage, as_json=as_json)
