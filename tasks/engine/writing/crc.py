"""Source checksums, verified in the same pass that moves the bytes.

A writer's CRC32 covers one fragment's whole payload, while a target may need only a piece of it. So the reader reports the CRC of each
piece, and pieces that tile a payload are combined into the CRC of the whole, without reading anything twice. The checksums are isal's:
those of zlib, at several times its speed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from isal.isal_zlib import crc32_combine

from reports.errors import FormatError


@dataclass(frozen=True, slots=True)
class CrcPiece:
    """The CRC32 of `nbytes` bytes from `start` of the payload of the catalog's fragment `fragment`."""

    fragment: int
    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class RecordedCrc:
    """What a fragment's writer recorded, and where the payload is."""

    fqn: str
    path: str
    start: int
    nbytes: int
    crc32: int


def verify_pieces(
    recorded: Mapping[int, RecordedCrc], pieces: Iterable[CrcPiece], read_crc: Callable[[RecordedCrc], int] | None
) -> list[CrcPiece]:
    """Hold pieces against the checksums their writers recorded.

    Args:
        recorded: by fragment; fragments without a recorded checksum are not judged.
        pieces: of any fragments, in any order.
        read_crc: reads a payload once more, for fragments whose pieces do not tile it; None leaves those for later.

    Returns:
        The pieces of fragments that were left for later.

    Raises:
        FormatError: a checksum disagrees; the message names tensor and file.
    """
    by_fragment: dict[int, list[CrcPiece]] = {}
    for piece in pieces:
        if piece.fragment in recorded:
            by_fragment.setdefault(piece.fragment, []).append(piece)
    left = []
    for fragment, own in sorted(by_fragment.items()):
        expected = recorded[fragment]
        found = _combine(own, expected.nbytes)
        if found is None and read_crc is None:
            left += own
            continue
        if found is None and read_crc is not None:
            found = read_crc(expected)
        if found != expected.crc32:
            raise FormatError(
                f"damaged: the values of {expected.fqn} have CRC32 {found:08x}, the writer recorded {expected.crc32:08x}"
                f" (bytes {expected.start}-{expected.start + expected.nbytes - 1})",
                where=expected.path,
                remedy="Restore this file from a copy, or export another step.",
            )
    return left


def _combine(pieces: list[CrcPiece], nbytes: int) -> int | None:
    at, crc = 0, 0
    for piece in sorted(pieces, key=lambda p: p.start):
        if piece.start != at:
            return None
        crc = crc32_combine(crc, piece.crc32, piece.nbytes)
        at += piece.nbytes
    return crc if at == nbytes else None
