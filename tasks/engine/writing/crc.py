"""Source checksums, verified in the same pass that moves the bytes.

A writer's CRC32 covers one record: the values of a fragment, or of many that lie one behind the other. A target needs only pieces of it.
So the reader reports the CRC of each piece it read, and pieces that tile a record are combined into the CRC of the whole; bytes that no
piece covers (padding, values that were dropped) are read for it, nothing twice. The checksums are isal's: those of zlib, at several times
its speed.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from isal.isal_zlib import crc32_combine

from reports.errors import FormatError

ReadCrc = Callable[[str, int, int], int]  # (path, start, nbytes) → CRC32


@dataclass(frozen=True, slots=True)
class CrcPiece:
    """The CRC32 of `nbytes` bytes from `start` of the file `path`."""

    path: str
    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class RecordedCrc:
    """The CRC32 that a writer recorded of `nbytes` bytes from `start` of the file `path`. `holds` says in words what they are."""

    holds: str
    path: str
    start: int
    nbytes: int
    crc32: int


def verify_pieces(recorded: Iterable[RecordedCrc], pieces: Iterable[CrcPiece], read_crc: ReadCrc | None) -> list[CrcPiece]:
    """Hold pieces against the checksums their writers recorded.

    Args:
        recorded: records that do not overlap; pieces outside of them are not judged.
        pieces: each inside one record, in any order.
        read_crc: reads the bytes of a record that no piece covers; None leaves such records for later.

    Returns:
        The pieces of records that were left for later.

    Raises:
        FormatError: a checksum disagrees; the message names tensor and file.
    """
    left = []
    for expected, own in _by_record(recorded, pieces):
        found = _combine(expected, own, read_crc)
        if found is None:
            left += own
        elif found != expected.crc32:
            raise FormatError(
                f"damaged: {expected.holds} have CRC32 {found:08x}, the writer recorded {expected.crc32:08x}"
                f" (bytes {expected.start}-{expected.start + expected.nbytes - 1})",
                where=expected.path,
                remedy="Restore this file from a copy, or export another step.",
            )
    return left


def _by_record(recorded: Iterable[RecordedCrc], pieces: Iterable[CrcPiece]) -> list[tuple[RecordedCrc, list[CrcPiece]]]:
    records = sorted(recorded, key=lambda record: (record.path, record.start))
    keys = [(record.path, record.start) for record in records]
    own: list[list[CrcPiece]] = [[] for _ in records]
    for piece in pieces:
        at = bisect_right(keys, (piece.path, piece.start)) - 1
        if at >= 0 and records[at].path == piece.path and piece.start + piece.nbytes <= records[at].start + records[at].nbytes:
            own[at].append(piece)
    return [(record, found) for record, found in zip(records, own, strict=True) if found]


def _combine(record: RecordedCrc, pieces: list[CrcPiece], read_crc: ReadCrc | None) -> int | None:
    at, crc, stop = record.start, 0, record.start + record.nbytes
    for piece in sorted(pieces, key=lambda p: (p.start, -p.nbytes)):
        if piece.start < at:  # read before, by another target
            continue
        if piece.start > at:
            if read_crc is None:
                return None
            crc = crc32_combine(crc, read_crc(record.path, at, piece.start - at), piece.start - at)
        crc = crc32_combine(crc, piece.crc32, piece.nbytes)
        at = piece.start + piece.nbytes
    if at < stop:
        if read_crc is None:
            return None
        crc = crc32_combine(crc, read_crc(record.path, at, stop - at), stop - at)
    return crc
