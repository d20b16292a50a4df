"""Approval before publish: a person reads the verdict and decides, in Prefect's page or at the terminal. Silence rejects.

Source: prefect 3.9, `pause_flow_run(wait_for_input=)`: the run waits in its process, shown as Paused, until its form is sent (page: Resume)
or the time is over. The form's first choice is its default.
"""

import select
import sys
import time
from contextvars import ContextVar
from dataclasses import replace
from typing import Literal, Protocol

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from pydantic import Field

from flows.run import Outcome
from reports.markdown import code_span
from reports.model import Report
from reports.text import summary_lines
from validators.approval import Answer
from validators.policy import REQUIRED_CHECKS

_POLL_SECONDS = 3


class Asker(Protocol):
    """Asks a person whether a release may be published."""

    def __call__(self, outcome: Outcome, seconds: int) -> Answer:
        """Ask, and wait.

        Args:
            outcome: what the checks say.
            seconds: how long to wait.

        Returns:
            The answer; `unanswered` when the time is over.
        """


class Decision(RunInput):
    """The form."""

    decision: Literal["reject", "approve"] = Field("reject", description="approve publishes; anything else leaves nothing behind.")
    by: str = Field("", description="Who decides. Stands in the report.")
    reason: str = Field("", description="Why. Stands in the report.")


def ask_in_page(outcome: Outcome, seconds: int) -> Answer:
    """Ask with a form in Prefect's page. Inside a flow run only.

    Args:
        outcome: what the checks say; shown above the form.
        seconds: how long to wait.

    Returns:
        The answer.
    """
    waiting = _waiting(outcome)
    written = sum(phase.nbytes_written for phase in waiting.phases)
    told = (*summary_lines(waiting, REQUIRED_CHECKS), f"size     {written:,} bytes", f"report   {outcome.paths.html}")
    log = get_run_logger()
    for line in told:
        log.info(line)
    log.info(f"waits    {seconds:,} s for an answer: Resume in this run's menu opens the form; silence rejects")
    try:
        given = pause_flow_run(
            Decision.with_initial_data(description="\n\n".join(code_span(line) for line in told)),
            timeout=seconds,
            poll_interval=_POLL_SECONDS,
        )
    except FlowPauseTimeout:
        return Answer("unanswered", seconds=seconds)
    return Answer(given.decision, given.by, given.reason)


def ask_at_terminal(outcome: Outcome, seconds: int) -> Answer:
    """Ask on standard error, and read standard input until a line says yes or no.

    Args:
        outcome: what the checks say.
        seconds: how long to wait.

    Returns:
        The answer.
    """
    print(f"checked  {_waiting(outcome).verdict(REQUIRED_CHECKS).line}", file=sys.stderr)
    print(f"report   {outcome.paths.html}", file=sys.stderr)
    deadline = time.monotonic() + seconds
    while True:
        print(f"Publish {outcome.report.subject}? yes or no, within {seconds:,} s: ", end="", file=sys.stderr, flush=True)
        ready, _, _ = select.select([sys.stdin], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            print(file=sys.stderr)
            return Answer("unanswered", seconds=seconds)
        line = sys.stdin.readline()
        answer = line.strip().lower()
        if answer in ("yes", "no") or not line:  # nothing at all is the end of the input
            return Answer("approve" if answer == "yes" else "reject", "the terminal", f"answered {line.strip()!r}")


def _waiting(outcome: Outcome) -> Report:
    return replace(outcome.report, action="ready to be published", notes=())


ASKING: ContextVar[Asker] = ContextVar("ASKING", default=ask_in_page)  # who asks: a flow's parameters are data, so it cannot be handed in
