"""One output file, written in order: the caller reads, one thread hashes, one writes, over a ring of fixed buffers.

hashlib, zlib, preadv and pwrite release the GIL, so the three really overlap. Memory is `DEPTH` buffers, whatever the file's size. Buffers
are pages of their own: from one that does not start on a page, the kernel wrote at less than half the speed where this was measured.
"""

import hashlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

CHUNK_NBYTES = 1 << 20  # stays in a core's cache from read to write: at 4 MiB the kernel spends three times as long
DEPTH = 8


class OrderedWriter:
    """Writes what it is given at increasing offsets, and digests it on the way.

    Args:
        fd: an empty file open for writing; not closed here.
        with_digest: whether sha256 is computed.
    """

    def __init__(self, fd: int, *, with_digest: bool) -> None:
        self._fd = fd
        self._at = 0
        self._sha256 = hashlib.sha256() if with_digest else None
        self._in_flight: deque[tuple[list[Future[None]], mmap.mmap]] = deque()
        self._free = [mmap.mmap(-1, CHUNK_NBYTES) for _ in range(DEPTH)]
        self._hash_thread = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="pwrite")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hash_thread.shutdown(wait=True, cancel_futures=True)
        self._write_thread.shutdown(wait=True, cancel_futures=True)

    def buffer(self) -> mmap.mmap:
        """Wait for a free buffer.

        Returns:
            CHUNK_NBYTES to fill and hand to `put_buffer`.
        """
        while not self._free:
            self._retire()
        return self._free.pop()

    def put_buffer(self, buffer: mmap.mmap, nbytes: int) -> None:
        """Write the first `nbytes` of a buffer that came from `buffer`.

        Args:
            buffer: filled by the caller, who must not touch it again.
            nbytes: how much of it counts.
        """
        view = memoryview(buffer)[:nbytes]
        futures = [self._write_thread.submit(_write, self._fd, self._at, view)]
        if self._sha256 is not None:
            futures.append(self._hash_thread.submit(self._sha256.update, view))
        self._in_flight.append((futures, buffer))
        self._at += nbytes

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

    def copy_range(self, source: int, start: int, nbytes: int) -> None:
        """Let the kernel copy a range of another file; not possible with a digest.

        Args:
            source: descriptor of the other file.
            start: first byte there.
            nbytes: length.

        Raises:
            OSError: the disk is full or failing, or the source ends early.
        """
        assert self._sha256 is None
        self.drain()
        done = 0
        while done < nbytes:
            got = os.copy_file_range(source, self._fd, nbytes - done, start + done, self._at + done)
            if got == 0:
                raise OSError(f"source ends at byte {start + done}")
            done += got
        self._at += nbytes

    def drain(self) -> None:
        """Wait until everything put so far is written and digested; raises what a thread raised."""
        while self._in_flight:
            self._retire()

    def finish(self) -> str:
        """Wait for the last byte.

        Returns:
            The sha256 in hex, or "" where none was asked for.
        """
        self.drain()
        return self._sha256.hexdigest() if self._sha256 else ""

    def _retire(self) -> None:
        futures, buffer = self._in_flight.popleft()
        for future in futures:
            future.result()
        self._free.append(buffer)


def _write(fd: int, at: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
