"""One output file, written in order over a ring of fixed buffers.

Where fewer files are written than there are workers, a second thread hashes while the caller writes. hashlib, isal, preadv and pwrite
release the GIL, so the two really overlap. Where every worker has a file of its own, or nothing is hashed, handing over only costs.
Memory is `DEPTH` buffers, whatever the file's size. Buffers are pages of their own: from one that does not start on a page, the kernel
wrote at less than half the speed where this was measured.

A buffer is a stretch of the file, however many small pieces it is filled with, and is written in `WRITE_NBYTES` that start at multiples of
it. The page cache takes memory in blocks as large as a write: where one of 1 MB cost two to five times the processor time now and then (a
virtual machine, whose host takes large free blocks back), one of 256 KiB never did, and one of 128 KiB was slower where memory is at hand.
"""

import hashlib
import mmap
import os
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

CHUNK_NBYTES = 1 << 20  # larger ones leave the cache between read and write, smaller ones make threads wait for the interpreter
WRITE_NBYTES = 1 << 18
DEPTH = 4


class OrderedWriter:
    """Writes what it is given at increasing offsets, and digests it on the way.

    Args:
        fd: an empty file open for writing; not closed here.
        with_digest: whether sha256 is computed.
        with_helper: whether a second thread computes it.
    """

    def __init__(self, fd: int, *, with_digest: bool, with_helper: bool = True) -> None:
        self._fd = fd
        self._at = 0
        self._sha256 = hashlib.sha256() if with_digest else None
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._filled: SimpleQueue[memoryview | None] = SimpleQueue()
        self._buffer: memoryview | None = None  # the one being filled, up to `_fill`
        self._fill = 0
        self._helper: Thread | None = None
        if self._sha256 is not None and with_helper:
            self._helper = Thread(target=self._hash, args=(self._sha256,), name="hash")
            self._helper.start()
        for _ in range(DEPTH if self._helper else 1):
            self._free.put(memoryview(mmap.mmap(-1, CHUNK_NBYTES)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._join()

    def space(self) -> memoryview:
        """Wait for room for the next bytes.

        Returns:
            Room for at least one byte and at most CHUNK_NBYTES, to fill from its beginning and to tell `advance` of.
        """
        if self._buffer is None:
            self._buffer, self._fill = self._free.get(), 0
        return self._buffer[self._fill :]

    def advance(self, nbytes: int) -> None:
        """Take the first bytes of what `space` gave as the next of the file.

        Args:
            nbytes: how many of them are filled.

        Raises:
            OSError: the disk is full or failing.
        """
        assert self._buffer is not None
        self._fill += nbytes
        if self._fill == len(self._buffer):
            self._hand_over(self._buffer)

    def put(self, view: memoryview) -> None:
        """Write bytes that lie elsewhere: they are copied into buffers first.

        Args:
            view: contiguous bytes, of any length.

        Raises:
            OSError: the disk is full or failing.
        """
        while len(view):
            room = self.space()
            nbytes = min(len(room), len(view))
            room[:nbytes] = view[:nbytes]
            self.advance(nbytes)
            view = view[nbytes:]

    def finish(self) -> str:
        """Wait for the last byte.

        Returns:
            The sha256 in hex, or "" where none was asked for.

        Raises:
            OSError: the disk is full or failing.
        """
        if self._buffer is not None:
            self._hand_over(self._buffer)
        self._join()
        return self._sha256.hexdigest() if self._sha256 else ""

    def _hand_over(self, buffer: memoryview) -> None:
        # What is filled of a buffer goes to the file; until it comes back as free, nobody may touch it.
        view, at = buffer[: self._fill], self._at
        self._buffer, self._at = None, at + len(view)
        if self._helper is not None:
            self._filled.put(view)
            _write(self._fd, at, view)  # the buffer may be free before it is written, but only this thread asks for free ones
            return
        if self._sha256 is not None:
            self._sha256.update(view)
        _write(self._fd, at, view)
        self._free.put(buffer)

    def _join(self) -> None:
        if self._helper is not None:
            self._filled.put(None)
            self._helper.join()

    def _hash(self, sha256: "hashlib._Hash") -> None:
        while (view := self._filled.get()) is not None:
            sha256.update(view)
            self._free.put(memoryview(view.obj))


def _write(fd: int, at: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        most = WRITE_NBYTES - (at + done) % WRITE_NBYTES
        done += os.pwrite(fd, view[done : done + most], at + done)
