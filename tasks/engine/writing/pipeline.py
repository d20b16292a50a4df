"""One output file, written in order over a ring of fixed buffers.

Where fewer files are written than there are workers, a second thread takes half of a file's work: with a digest it hashes while the caller
writes; without, it writes while the caller reads on. hashlib, isal, preadv and pwrite release the GIL, so the two really overlap. Where
every worker has a file of its own, handing over only costs. Memory is `DEPTH` buffers, whatever the file's size. Buffers are pages of
their own: from one that does not start on a page, the kernel wrote at less than half the speed where this was measured.
"""

import hashlib
import mmap
import os
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

CHUNK_NBYTES = 1 << 20  # larger ones leave the cache between read and write, smaller ones make threads wait for the interpreter
DEPTH = 4


class OrderedWriter:
    """Writes what it is given at increasing offsets, and digests it on the way.

    Args:
        fd: an empty file open for writing; not closed here.
        with_digest: whether sha256 is computed.
        with_helper: whether a second thread takes half of the work.
    """

    def __init__(self, fd: int, *, with_digest: bool, with_helper: bool = True) -> None:
        self._fd = fd
        self._at = 0
        self._sha256 = hashlib.sha256() if with_digest else None
        self._failed: list[OSError] = []
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._filled: SimpleQueue[tuple[mmap.mmap, int, int] | None] = SimpleQueue()
        for _ in range(DEPTH if with_helper else 1):
            self._free.put(mmap.mmap(-1, CHUNK_NBYTES))
        self._helper = Thread(target=self._help, name="hash" if with_digest else "write") if with_helper else None
        if self._helper is not None:
            self._helper.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._join()

    def buffer(self) -> mmap.mmap:
        """Wait for a free buffer.

        Returns:
            CHUNK_NBYTES to fill and hand to `put_buffer`.

        Raises:
            OSError: the second thread could not write; the disk is full or failing.
        """
        free = self._free.get()
        if self._failed:
            raise self._failed[0]
        return free

    def put_buffer(self, buffer: mmap.mmap, nbytes: int) -> None:
        """Write the first `nbytes` of a buffer that came from `buffer`.

        Args:
            buffer: filled by the caller, who must not touch it again.
            nbytes: how much of it counts.
        """
        at, self._at = self._at, self._at + nbytes
        view = memoryview(buffer)[:nbytes]
        if self._helper is None:
            if self._sha256 is not None:
                self._sha256.update(view)
            _write(self._fd, at, view)
            self._free.put(buffer)
            return
        self._filled.put((buffer, nbytes, at))
        if self._sha256 is not None:  # the buffer may be free before it is written, but only this thread asks for free ones
            _write(self._fd, at, view)

    def put(self, view: memoryview) -> None:
        """Write bytes that lie elsewhere: they are copied into buffers first.

        Args:
            view: contiguous bytes, of any length.
        """
        for start in range(0, len(view), CHUNK_NBYTES):
            part = view[start : start + CHUNK_NBYTES]
            buffer = self.buffer()
            buffer[: len(part)] = part
            self.put_buffer(buffer, len(part))

    def finish(self) -> str:
        """Wait for the last byte.

        Returns:
            The sha256 in hex, or "" where none was asked for.

        Raises:
            OSError: the second thread could not write.
        """
        self._join()
        if self._failed:
            raise self._failed[0]
        return self._sha256.hexdigest() if self._sha256 else ""

    def _join(self) -> None:
        if self._helper is not None:
            self._filled.put(None)
            self._helper.join()

    def _help(self) -> None:
        while (filled := self._filled.get()) is not None:
            buffer, nbytes, at = filled
            view = memoryview(buffer)[:nbytes]
            if self._sha256 is not None:
                self._sha256.update(view)
            elif not self._failed:
                try:
                    _write(self._fd, at, view)
                except OSError as error:
                    self._failed.append(error)
            self._free.put(buffer)


def _write(fd: int, at: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
