"""Byte ranges of files, read in one go. Every refusal names the file; no file stays open."""

import os
from pathlib import Path

from reports.errors import FormatError

READ_REMEDY = "Check the file's permissions and the disk, or restore the file."
SHORT_REMEDY = "Restore the file from another copy or export another step."


def read_range(path: Path | str, start: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes from `start` of a file.

    Args:
        path: the file.
        start: first byte.
        nbytes: how many; all of them must exist.

    Returns:
        Exactly `nbytes` bytes.

    Raises:
        FormatError: the file cannot be read, or ends before `start + nbytes`.
    """
    if start < 0 or nbytes < 0:
        raise FormatError(f"asks for {nbytes} bytes from {start}", where=str(path), remedy=SHORT_REMEDY)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts, at = [], start
            while at < start + nbytes:
                part = os.pread(handle, min(start + nbytes - at, 1 << 30), at)
                if not part:
                    size = os.fstat(handle).st_size
                    raise FormatError(f"file ends at byte {size}, wanted {start + nbytes}", where=str(path), remedy=SHORT_REMEDY)
                parts.append(part)
                at += len(part)
        finally:
            os.close(handle)
    except OSError as error:
        raise unreadable(path, error) from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_whole(path: Path | str) -> bytes:
    """Return all bytes of a small file.

    Args:
        path: the file.

    Returns:
        Its content.

    Raises:
        FormatError: the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> FormatError:
    """Return the refusal of a file the system would not give us.

    Args:
        path: the file.
        error: what the system said.

    Returns:
        A FormatError to raise.
    """
    return FormatError(f"cannot be read: {error.strerror or error}", where=str(path), remedy=READ_REMEDY)
