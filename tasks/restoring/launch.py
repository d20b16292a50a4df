"""Starting a process that restores, and waiting for its answer. Imports no torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from reports.errors import FormatError
from tasks.restoring.jobs import RestoreAnswer, RestoreJob, ResumeAnswer, ResumeJob
from validators.drills.stored import read_stored, write_stored

A = TypeVar("A", RestoreAnswer, ResumeAnswer)


def restore(job: RestoreJob, folder: Path, seconds: float) -> RestoreAnswer:
    """Load a save at several world sizes, in processes of their own.

    Args:
        job: what to load.
        folder: for the job's files and its log.
        seconds: how long to wait.

    Returns:
        The answer.

    Raises:
        FormatError: it took too long, or the process ended without an answer.
    """
    return _run("restore", write_stored(job, folder / "restore.job.json"), RestoreAnswer, seconds)


def resume(job: ResumeJob, folder: Path, seconds: float) -> ResumeAnswer:
    """Continue training from a save, in processes of their own.

    Args:
        job: what to continue.
        folder: for the job's files and its log.
        seconds: how long to wait.

    Returns:
        The answer.

    Raises:
        FormatError: it took too long, or the process ended without an answer.
    """
    return _run("resume", write_stored(job, folder / "resume.job.json"), ResumeAnswer, seconds)


def _run(kind: str, job: Path, answer_kind: type[A], seconds: float) -> A:
    answer, log = job.with_name(f"{kind}.answer.json"), job.with_name(f"{kind}.log")
    command = [sys.executable, "-P", "-m", "tasks.restoring.worker", kind, str(job), str(answer), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise FormatError(f"no answer after {seconds:g} seconds", where=kind, remedy=f"See {log}; --timeout gives more.") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not answer.is_file():
        raise FormatError(f"the process ended with code {process.returncode} and no answer", where=kind, remedy=f"See {log}.")
    return read_stored(answer_kind, answer)
