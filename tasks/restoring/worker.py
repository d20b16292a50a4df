"""A process that restores: imports torch once, and forks the ranks of each world size. Started by tasks.restoring.launch.

    python -m tasks.restoring.worker KIND JOB ANSWER PARENT

It and its ranks end when whoever started it does.
"""

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from reports.errors import ReleaseError
from tasks.restoring.jobs import RankAnswer, RestoreAnswer, RestoreJob, ResumeAnswer, ResumeJob, WorldAnswer
from validators.check import attempt, describe_error
from validators.drills.stored import read_stored, write_stored

A = TypeVar("A", WorldAnswer, RankAnswer)
_PEER = re.compile(r"[Gg]loo|[Cc]onnection|process group|ended without")  # in what a rank says when another one failed
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def main() -> None:
    """Do one job."""
    kind, job, answer = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    die_with_parent(int(sys.argv[4]))
    sys.path.append(os.getcwd())  # where --resume's module may lie; last, so that it shadows nothing
    {"restore": _restore, "resume": _resume}[kind](job, answer)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the one that started it ends; elsewhere than on Linux, end only if it has ended already.

    Args:
        parent: the process that started this one. If it ended before the kernel was asked, no signal would come.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _restore(job_path: Path, answer: Path) -> None:
    from tasks.restoring.ranks import restore_at

    job = read_stored(RestoreJob, job_path)
    worlds = []
    for world in job.worlds:
        answers = _run_world(world, job.scratch, lambda rank, world: restore_at(rank, world, job), WorldAnswer)
        refusal = first_cause([part.refusal for part in answers])
        worlds.append(WorldAnswer(world, refusal=refusal) if refusal else answers[0])
    write_stored(RestoreAnswer(tuple(worlds)), answer)


def first_cause(refusals: Sequence[str]) -> str:
    """Return why a world failed: what a rank says of itself rather than of a peer that went away.

    Args:
        refusals: one per rank, "" of those that did not fail.

    Returns:
        One of them; "" when none failed.
    """
    found = [refusal for refusal in refusals if refusal]
    return next((refusal for refusal in found if not _PEER.search(refusal)), found[0] if found else "")


def _resume(job_path: Path, answer: Path) -> None:
    from tasks.restoring.resume import resume_at

    job = read_stored(ResumeJob, job_path)
    ranks = _run_world(job.world, job.scratch, lambda rank, world: resume_at(rank, world, job), RankAnswer)
    write_stored(ResumeAnswer(tuple(ranks)), answer)


def _run_world(world: int, scratch: str, work: Callable[[int, int], A], kind: type[A]) -> list[A]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_run_rank, args=(rank, world, folder, work, kind, os.getpid())) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        paths = [Path(folder) / f"rank-{rank}.json" for rank in range(world)]
        return [read_stored(kind, path) if path.is_file() else _lost(kind, rank) for rank, path in enumerate(paths)]


def _lost(kind: type[A], rank: int) -> A:
    return kind(rank, refusal=f"rank {rank} ended without an answer")


def _run_rank(rank: int, world: int, folder: str, work: Callable[[int, int], A], kind: type[A], parent: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    die_with_parent(parent)
    warnings.simplefilter("ignore")
    if kind is WorldAnswer:
        torch.set_num_threads(1)  # in a resume they are the user's: sums depend on their number
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    path = Path(folder) / f"rank-{rank}.json"

    def join_and_work() -> A:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        try:
            answer = work(rank, world)
        except CheckpointException as error:  # no Exception: it wraps what ranks raised, with their tracebacks
            cause = next(wrapped for wrapped, _ in error.failures.values())
            raise cause if isinstance(cause, Exception) else RuntimeError(str(cause)) from None
        dist.barrier()
        return answer

    done = attempt(join_and_work)  # the user's code and torch's: whatever they raise is the answer
    answer = kind(rank, refusal=_spell(done)) if isinstance(done, Exception) else done
    partial = write_stored(answer, path.with_suffix(".part"))
    partial.rename(path)
    os._exit(0)  # peers that failed would keep gloo's threads waiting


def _spell(error: Exception) -> str:
    return str(error) if isinstance(error, ReleaseError) else describe_error(error)


if __name__ == "__main__":
    main()
