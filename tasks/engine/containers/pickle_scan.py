"""Proof that a pickle's opcodes are whole and ask for no more than its bytes can need, before the C unpickler sees it.

The C unpickler takes memory on a pickle's word: a memo index of 2^32 costs it 64 GiB, and one flipped bit is enough to ask for that.
Here every opcode is walked over, runs of fixed-length ones by one regular expression (140 MB take 3 s).

Refused: lengths behind the end, memo indices beyond the number of bytes, opcodes that no checkpoint needs (extensions, buffers outside).

Source: Python 3.13, Lib/pickletools.py (the opcodes), Modules/_pickle.c (`_Unpickler_MemoPut`).
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

# Opcodes by the bytes of their argument
_NO_ARGUMENT = rb"()012NQRabdelostu}\]\x81\x85-\x89\x8f-\x94"
_ONE_BYTE = rb"Khq\x80"
_FOUR_BYTES = rb"Jj"
_EIGHT_BYTES = rb"G\x95"
_FIXED = re.compile(
    rb"(?:[" + _NO_ARGUMENT + rb"]|[" + _ONE_BYTE + rb"].|M..|[" + _FOUR_BYTES + rb"].{4}|[" + _EIGHT_BYTES + rb"].{8})*+", re.DOTALL
)

STOP = ord(".")
LONG_BINPUT = ord("r")
PUT = ord("p")
# Opcodes followed by a length of so many bytes, and that many bytes
LENGTH_NBYTES: Mapping[int, int] = MappingProxyType(
    dict.fromkeys(b"UC\x8a\x8c", 1) | dict.fromkeys(b"TBX\x8b", 4) | dict.fromkeys(b"\x8d\x8e", 8)
)
# Opcodes followed by so many lines of text
LINES: Mapping[int, int] = MappingProxyType(dict.fromkeys(b"ILFSVPgp", 1) | dict.fromkeys(b"ci", 2))


def find_fault(content: bytes) -> str:
    """Return what is wrong with a pickle's opcodes.

    Args:
        content: the pickle; what follows its STOP is not looked at.

    Returns:
        A clause; empty when nothing is.
    """
    return _scan(content)[0]


def find_stop(content: bytes) -> int:
    """Return where a pickle ends.

    Args:
        content: a pickle in which `find_fault` finds nothing.

    Returns:
        The byte of its STOP.
    """
    return _scan(content)[1]


def _scan(content: bytes) -> tuple[str, int]:
    # What is wrong, and the byte the scan came to.
    at, total = 0, len(content)
    while True:
        match = _FIXED.match(content, at)
        at = match.end() if match else at
        if at >= total:
            return f"ends at byte {total} without a STOP", at
        opcode = content[at]
        if opcode == STOP:
            return "", at
        if opcode in LENGTH_NBYTES:
            width = LENGTH_NBYTES[opcode]
            end = at + 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")
        elif opcode in LINES:
            end = _skip_lines(content, at + 1, LINES[opcode])
        elif opcode == LONG_BINPUT:
            end = at + 5
        else:
            return f"opcode 0x{opcode:02x} at byte {at} is cut short or none that a checkpoint needs", at
        if end > total:
            return f"opcode at byte {at} needs bytes up to {end} of {total}", at
        if opcode in (LONG_BINPUT, PUT) and not _is_small_index(content[at:end], total):
            return f"memo index at byte {at} is larger than the pickle", at
        at = end


def _skip_lines(content: bytes, at: int, lines: int) -> int:
    # The byte behind so many line ends; behind the end when there are fewer.
    for _ in range(lines):
        at = content.find(b"\n", at) + 1
        if at == 0:
            return len(content) + 1
    return at


def _is_small_index(put: bytes, total: int) -> bool:
    if put[0] == LONG_BINPUT:
        return int.from_bytes(put[1:], "little") <= total
    return put[1:-1].isdigit() and len(put) < 12 and int(put[1:-1]) <= total
