"""Retries, where they help: a network file system that did not answer. Never a failed check, a full disk or a damaged file.

Source: errno(3); ESTALE and EIO are what NFS and Lustre clients return while a server fails over.
"""

import errno
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EREMOTEIO})


def is_transient(task: "Task[..., Any]", task_run: "TaskRun", state: "State[Any]") -> bool:
    """Return whether a task failed for a reason that may pass.

    Args:
        task: the task.
        task_run: its run.
        state: how the run ended.

    Returns:
        True for an OSError of a file system that did not answer.
    """
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError) and error.errno in TRANSIENT


class _Retries(TypedDict):
    retries: int
    retry_delay_seconds: list[float]
    retry_condition_fn: "Callable[[Task[..., Any], TaskRun, State[Any]], bool]"


RETRIES: _Retries = {"retries": 3, "retry_delay_seconds": [1.0, 5.0, 20.0], "retry_condition_fn": is_transient}
