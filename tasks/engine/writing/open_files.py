"""Read-only files, opened when first read and kept for the next read; at most LIMIT at a time, however many a checkpoint has."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from reports.errors import FormatError

LIMIT = 64  # far below the usual limit of 1024 descriptors; opening one costs a round trip on a parallel file system


@dataclass(slots=True)
class _Entry:
    fd: int
    users: int = 0


class OpenFiles:
    """Descriptors by path, for several threads; the least recently used ones are closed first, never one in use."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """Lend a descriptor.

        Args:
            path: absolute.

        Yields:
            A descriptor, open for reading while the block runs.

        Raises:
            FormatError: the file cannot be opened.
        """
        with self._lock:
            entry = self._entries.get(path)
            if entry is None:
                entry = self._entries[path] = _Entry(_open(path))
            entry.users += 1
            self._entries.move_to_end(path)
            self._close_idle(LIMIT)
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        """Fill `view` from `start` of `path`.

        Args:
            path: absolute.
            start: first byte.
            view: writable bytes.

        Raises:
            FormatError: the file ends early or the disk fails.
        """
        at = 0
        with self.open(path) as fd:
            while at < len(view):
                try:
                    got = os.preadv(fd, [view[at:]], start + at)
                except OSError as error:
                    raise FormatError(
                        f"byte {start + at} cannot be read: {error.strerror}", where=path, remedy="Check the disk."
                    ) from error
                if got == 0:
                    raise FormatError(f"ends at byte {start + at}", where=path, remedy="Restore this file from a copy.")
                at += got

    def close(self) -> None:
        """Close every descriptor that is not lent."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, keep: int) -> None:
        for path in [path for path, entry in self._entries.items() if not entry.users][: max(0, len(self._entries) - keep)]:
            os.close(self._entries.pop(path).fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=path, remedy="Check its permissions.") from error
