"""One run: its id, folder, clock, and how its tasks are called."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prefect import Task
from prefect.logging import get_run_logger
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.callables import get_call_parameters

from flows.run_folder import make_run_folder, now, versions
from flows.run_logs import leave_out_tracebacks
from reports.errors import ReleaseError
from reports.model import Phase, Report, Verdict
from reports.text import summary_lines
from reports.write import ReportPaths
from tasks.artifacts import show_check, show_findings, show_refusal, show_report, show_trends
from validators.policy import REQUIRED_CHECKS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the report, where its renderings are, the verdict, and the stage that was kept, if any."""

    report: Report
    paths: ReportPaths
    verdict: Verdict
    stage: Path | None = None

    def show(self) -> None:
        """Show verdict, what did not pass, and findings in Prefect: as artifacts and in the run's log. Inside a flow run only."""
        show_report(self.report, self.paths, REQUIRED_CHECKS)
        for result in self.report.results:
            if result.status not in ("passed", "skipped"):  # the report names them all
                show_check(result)
        if any(result.findings for result in self.report.results):
            show_findings(self.report.results)
        show_trends(self.report)
        log = get_run_logger()
        *told, verdict = summary_lines(self.report, REQUIRED_CHECKS)
        for line in told:
            log.info(line)
        log.log(logging.INFO if self.verdict.green else logging.ERROR, verdict)
        log.info(f"report   {self.paths.html}")


class RedVerdictError(Exception):
    """A check failed; the report says why.

    Args:
        outcome: the report and where it is.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.verdict.line)


leave_out_tracebacks(ReleaseError, RedVerdictError)  # when a flow is loaded: its parameters are refused before it is called


def show_ended(work: Callable[[], Outcome]) -> str:
    """Do a flow's work, and show in Prefect how it ended, green or red. Inside a flow run only.

    Args:
        work: runs the line.

    Returns:
        Path of the HTML report of a green run.

    Raises:
        RedVerdictError: a check failed.
        ReleaseError: the work could not be done.
    """
    try:
        outcome = work()
    except RedVerdictError as red:
        red.outcome.show()
        raise
    except ReleaseError as refused:
        show_refusal(refused)
        raise
    outcome.show()
    return str(outcome.paths.html)


class Runner(Protocol):
    """How a flow calls its tasks: through Prefect, or as the plain functions they wrap."""

    def call(self, task: "Task[Any, T]", /, *args: object, **kwargs: object) -> T:
        """Run one task.

        Args:
            task: the task.
            *args: its arguments.
            **kwargs: its named arguments.

        Returns:
            Its result.
        """

    def map(self, task: "Task[Any, T]", calls: Sequence[tuple[object, ...]], workers: int, /) -> list[T]:
        """Run a task once per argument tuple, several at a time; the first exception is raised.

        Args:
            task: the task.
            calls: arguments per call.
            workers: how many at a time.

        Returns:
            Results, in the order of `calls`.
        """


@dataclass(frozen=True, slots=True)
class PlainRunner:
    """Calls the functions that the tasks wrap; knows no Prefect server. For tests and for use as a library."""

    def call(self, task: "Task[Any, T]", /, *args: object, **kwargs: object) -> T:
        """Run one task's function.

        Args:
            task: the task.
            *args: its arguments.
            **kwargs: its named arguments.

        Returns:
            Its result.
        """
        return task.fn(*args, **kwargs)

    def map(self, task: "Task[Any, T]", calls: Sequence[tuple[object, ...]], workers: int, /) -> list[T]:
        """Run a task's function on a thread pool.

        Args:
            task: the task.
            calls: arguments per call.
            workers: how many at a time.

        Returns:
            Results, in the order of `calls`.
        """
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(task.fn, *args) for args in calls]
            try:
                return [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class PrefectRunner:
    """Calls tasks through Prefect, inside a flow run."""

    def call(self, task: "Task[Any, T]", /, *args: object, **kwargs: object) -> T:
        """Run one task.

        Args:
            task: the task.
            *args: its arguments.
            **kwargs: its named arguments.

        Returns:
            Its result.
        """
        result: T = task(*args, **kwargs)
        return result

    def map(self, task: "Task[Any, T]", calls: Sequence[tuple[object, ...]], workers: int, /) -> list[T]:
        """Submit a task once per argument tuple to a task runner of its own: the flow's has no limit.

        Args:
            task: the task.
            calls: arguments per call.
            workers: how many at a time.

        Returns:
            Results, in the order of `calls`.
        """
        pool: ThreadPoolTaskRunner[T] = ThreadPoolTaskRunner(workers)
        with pool:
            futures = [pool.submit(task, get_call_parameters(task.fn, args, {})) for args in calls]
            return [future.result() for future in futures]


class Progress(Protocol):
    """Told of bytes while they are written; from several threads."""

    def start(self, total: int) -> None:
        """Note that a phase begins.

        Args:
            total: its bytes.
        """

    def advance(self, nbytes: int) -> None:
        """Note that more is done.

        Args:
            nbytes: bytes since the last call.
        """

    def stop(self) -> None:
        """The phase is over."""


class Silent:
    """Progress that nobody watches."""

    def start(self, total: int) -> None:
        """Do nothing.

        Args:
            total: bytes.
        """

    def advance(self, nbytes: int) -> None:
        """Do nothing.

        Args:
            nbytes: bytes.
        """

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Both:
    """Progress that two watch."""

    first: Progress
    second: Progress

    def start(self, total: int) -> None:
        """Tell both that a phase begins.

        Args:
            total: bytes.
        """
        self.first.start(total)
        self.second.start(total)

    def advance(self, nbytes: int) -> None:
        """Tell both of bytes done.

        Args:
            nbytes: bytes.
        """
        self.first.advance(nbytes)
        self.second.advance(nbytes)

    def stop(self) -> None:
        """Tell both that the phase is over."""
        self.first.stop()
        self.second.stop()


WATCHING: ContextVar[Progress] = ContextVar("WATCHING", default=Silent())  # noqa: B039  (Silent keeps nothing)


@contextmanager
def watched_by(progress: Progress) -> Iterator[None]:
    """Let flows that run inside the block report to `progress`: a flow's parameters are data, so it cannot be handed in.

    Args:
        progress: told of bytes written.

    Yields:
        Nothing.
    """
    token = WATCHING.set(progress)
    try:
        yield
    finally:
        WATCHING.reset(token)


@dataclass(slots=True)
class Run:
    """One run of a flow. `reached` is told the name of every step that must survive a kill; tests use it. `notes` go into the report."""

    run_id: str
    folder: Path
    runner: Runner
    progress: Progress = field(default_factory=Silent)
    reached: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.perf_counter
    started: str = field(default_factory=now)
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=versions)

    @classmethod
    def create(cls, kind: str, runs: Path, runner: Runner, progress: Progress | None = None) -> "Run":
        """Make a run and its folder.

        Args:
            kind: the flow's name; begins the run id.
            runs: where run folders go.
            runner: how tasks are called.
            progress: told of bytes written.

        Returns:
            The run.
        """
        run_id, folder = make_run_folder(kind, runs)
        return cls(run_id, folder, runner, progress or Silent())

    def phase(self, name: str, work: Callable[[], T], *, nbytes_read: int = 0, nbytes_written: int = 0) -> T:
        """Do a step of the line and note how long it took.

        Args:
            name: the step.
            work: does it.
            nbytes_read: bytes it reads.
            nbytes_written: bytes it writes.

        Returns:
            What `work` returned.
        """
        begun = self.clock()
        result = work()
        self.phases.append(Phase(name, self.clock() - begun, nbytes_read, nbytes_written))
        return result
