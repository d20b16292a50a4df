"""Who may write: to a destination nobody where something is, else one export at a time.

An advisory lock on a file beside it, freed by the kernel when its holder dies. Ours, since filelock leaves the lock file behind: this one
is removed under the lock, and a lock won on a removed file does not count.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from reports.errors import CommitError
from validators.release import MARKER_NAME


def refuse_taken(destination: Path) -> None:
    """Raise when a destination exists.

    Args:
        destination: where the release will be.

    Raises:
        CommitError: something is there; the message says whether it is a committed release.
    """
    if os.path.lexists(destination):
        kind = "holds a committed release" if (destination / MARKER_NAME).is_file() else "exists already"
        raise CommitError(kind, where=str(destination), remedy="Nothing is ever overwritten: choose another --to, or remove it yourself.")


class ProcessLock:
    """Context manager that one process holds at a time.

    Args:
        path: the lock file, such as `.OUT.shardwright.lock`.
        refusal: raised where another process holds it.
        wait: whether to wait for that one instead.
    """

    def __init__(self, path: Path, refusal: CommitError, *, wait: bool = False) -> None:
        self._path, self._refusal, self._fd = path, refusal, -1
        self._how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB

    def __enter__(self) -> Self:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, self._how)
            except BlockingIOError:
                os.close(fd)
                raise self._refusal from None
            if self._is_current(fd):
                self._fd = fd
                return self
            os.close(fd)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == self._path.stat().st_ino
        except FileNotFoundError:
            return False
