"""The zip that torch.save writes: where its records lie, and the tensors its `data.pkl` describes. Knows no checkpoint format.

An *archive* is such a zip; it may be a whole file or lie in the middle of one (an item of a `.distcp`). A *record* is one member of it,
stored without compression. Records of an archive share a top folder (`archive/`), which is left off here. Only the end of the archive and
the records asked for are read.

Refused: compression, encryption, several disks, archives cut short, records that leave the archive, big-endian values.

Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14-16 (end records); torch 2.13,
caffe2/serialize/inline_container.cc and torch/serialization.py.
"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reports.errors import FormatError
from tasks.engine.containers.ranges import read_range

REMEDY = "Restore the file from another copy or export another step."
TAIL_NBYTES = 4096  # holds the end records, and the directory of an archive of a few records
HEAD_NBYTES = 2048  # holds the description of an archive of one tensor, and the header of its values
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save before 1.6: pickle of 0x1950a86a20f9469cfc6c

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x1
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Record:
    """One member of an archive: its local header begins at byte `header_at` of the archive, its values take `nbytes`."""

    name: str
    stored_name: bytes
    header_at: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Archive:
    """A torch.save zip at [start, start + nbytes) of the file `path`. `has_crc32` is False when its writer recorded no checksums.

    `head` are its first bytes, kept from opening.
    """

    path: str
    start: int
    nbytes: int
    records: Mapping[str, Record]
    has_crc32: bool
    head: bytes

    def record(self, name: str) -> Record:
        """Return one record.

        Args:
            name: such as `data/0`.

        Returns:
            The record.

        Raises:
            FormatError: there is none of that name.
        """
        try:
            return self.records[name]
        except KeyError:
            raise self.refuse(f"no record {name}; there are {', '.join(sorted(self.records)[:5])}") from None

    def locate(self, name: str) -> int:
        """Return the byte of the file at which a record's values begin, as its local header says.

        Args:
            name: such as `data/0`.

        Returns:
            Absolute byte.

        Raises:
            FormatError: the local header is damaged, names another record, or the values leave the archive.
        """
        record = self.record(name)
        head = self._read(record.header_at, _LOCAL.size + len(record.stored_name))
        magic, _, _, _, _, _, _, _, _, name_nbytes, extra_nbytes = _LOCAL.unpack_from(head)
        if magic != b"PK\x03\x04" or name_nbytes != len(record.stored_name) or head[_LOCAL.size :] != record.stored_name:
            raise self.refuse(f"local header of record {name} is damaged or another record's")
        begin = record.header_at + _LOCAL.size + int(name_nbytes) + int(extra_nbytes)
        if begin + record.nbytes > self.nbytes:
            raise self.refuse(f"record {name} ends at byte {begin + record.nbytes} of {self.nbytes}")
        return self.start + begin

    def read(self, name: str) -> bytes:
        """Return a record's content; for small records.

        Args:
            name: such as `data.pkl`.

        Returns:
            Its bytes, checksum verified.

        Raises:
            FormatError: the record is absent, damaged or unreadable.
        """
        record = self.record(name)
        content = self._read(self.locate(name) - self.start, record.nbytes)
        if self.has_crc32 and zlib.crc32(content) != record.crc32:
            raise self.refuse(f"record {name} has CRC32 {zlib.crc32(content):08x}, the writer recorded {record.crc32:08x}")
        return content

    def verify(self, name: str) -> None:
        """Prove that a record's bytes have the checksum the writer recorded, reading it in pieces.

        Args:
            name: such as `data/0`.

        Raises:
            FormatError: they have not.
        """
        record = self.record(name)
        begin, crc32 = self.locate(name), 0
        for at in range(0, record.nbytes, _CHUNK):
            crc32 = zlib.crc32(read_range(self.path, begin + at, min(_CHUNK, record.nbytes - at)), crc32)
        if self.has_crc32 and crc32 != record.crc32:
            raise self.refuse(f"record {name} has CRC32 {crc32:08x}, the writer recorded {record.crc32:08x}")

    def _read(self, at: int, nbytes: int) -> bytes:
        # Bytes of the archive, from those kept where possible.
        if at + nbytes <= len(self.head):
            return self.head[at : at + nbytes]
        return read_range(self.path, self.start + at, nbytes)

    def refuse(self, what: str) -> FormatError:
        """Return the refusal of this archive.

        Args:
            what: what is wrong with it.

        Returns:
            A FormatError to raise, naming the file and the archive's place in it.
        """
        return _refuse(self.path, self.start, what)


def open_archive(path: str, start: int, nbytes: int) -> Archive:
    """Return the directory of the archive at [start, start + nbytes) of a file.

    Args:
        path: the file.
        start: first byte of the archive.
        nbytes: its length, end record included.

    Returns:
        Its records; none is read.

    Raises:
        FormatError: no such archive there; cut short, compressed, encrypted or contradictory.
    """
    if nbytes < _END.size:
        raise _refuse(path, start, f"{nbytes} bytes are too short for a torch.save archive")
    tail = read_range(path, start + max(0, nbytes - TAIL_NBYTES), min(nbytes, TAIL_NBYTES))
    end_at = nbytes - _END.size
    magic, disk, directory_disk, _, count, size, at, comment = _END.unpack_from(tail, len(tail) - _END.size)
    if magic != b"PK\x05\x06" or comment:
        raise _refuse(path, start, _why_no_end(path, start, nbytes))
    if _MAX16 in (count, disk) or _MAX32 in (size, at):
        end_at, count, size, at = _end64(path, start, nbytes, tail)
    elif disk or directory_disk:
        raise _refuse(path, start, "zip of several disks")
    if end_at - (at + size) not in (0, _END64.size + _LOCATOR64.size):  # torch writes the zip64 records always, used or not
        raise _refuse(path, start, f"zip directory [{at}, {at + size}) does not end at its end record at {end_at}")
    tail_at = nbytes - len(tail)
    directory = tail[at - tail_at : at - tail_at + size] if at >= tail_at else read_range(path, start + at, size)
    records = _records(path, start, directory, count, at)
    has_crc32 = any(record.crc32 for record in records.values())
    head = read_range(path, start, min(nbytes, HEAD_NBYTES))
    return Archive(path, start, nbytes, MappingProxyType(records), has_crc32, head)


def _end64(path: str, start: int, nbytes: int, tail: bytes) -> tuple[int, int, int, int]:
    # Where the zip64 end record begins, and count, size and offset of the directory.
    locator_at = nbytes - _END.size - _LOCATOR64.size
    if locator_at < _END64.size:
        raise _refuse(path, start, "zip64 end record is missing")
    magic, _, end_at, disks = _LOCATOR64.unpack_from(tail, len(tail) - _END.size - _LOCATOR64.size)
    if magic != b"PK\x06\x07" or disks > 1 or end_at + _END64.size > locator_at:
        raise _refuse(path, start, "zip64 locator is damaged")
    end_in_tail = end_at - (nbytes - len(tail))
    end = tail[end_in_tail : end_in_tail + _END64.size] if end_in_tail >= 0 else read_range(path, start + end_at, _END64.size)
    magic, _, _, _, _, _, _, count, size, at = _END64.unpack(end)
    if magic != b"PK\x06\x06":
        raise _refuse(path, start, "zip64 end record is damaged")
    return end_at, count, size, at


def _records(path: str, start: int, directory: bytes, count: int, directory_at: int) -> dict[str, Record]:
    records: dict[str, Record] = {}
    at = 0
    for _ in range(min(count, len(directory) // _ENTRY.size + 1)):
        if at + _ENTRY.size > len(directory):
            raise _refuse(path, start, "zip directory is cut short")
        magic, _, _, flags, method, _, _, crc32, packed, nbytes, name_len, extra_len, comment_len, _, _, _, header_at = _ENTRY.unpack_from(
            directory, at
        )
        begin, at = at + _ENTRY.size, at + _ENTRY.size + name_len + extra_len + comment_len
        if magic != b"PK\x01\x02" or at > len(directory):
            raise _refuse(path, start, "zip directory is damaged")
        stored_name = directory[begin : begin + name_len]
        extra = directory[begin + name_len : begin + name_len + extra_len]
        nbytes, packed, header_at = _wide(path, start, extra, nbytes, packed, header_at)
        _, _, name = stored_name.decode("utf-8", "backslashreplace").partition("/")
        if method or packed != nbytes or flags & _ENCRYPTED:
            raise _refuse(path, start, f"record {name} is compressed or encrypted, torch.save stores it plain")
        if header_at + _LOCAL.size + name_len + nbytes > directory_at:
            raise _refuse(path, start, f"record {name} of {nbytes} bytes at {header_at} reaches into the zip directory")
        if name in records:
            raise _refuse(path, start, f"record {name} occurs twice")
        records[name] = Record(name, stored_name, header_at, nbytes, crc32)
    if at != len(directory) or len(records) != count:
        raise _refuse(
            path, start, f"zip directory holds {len(records)} records in {at} bytes, its end record says {count} in {len(directory)}"
        )
    return records


def _wide(path: str, start: int, extra: bytes, *narrow: int) -> list[int]:
    # Fields of 32 bits that are all ones continue, in order, in the zip64 extra field.
    if _MAX32 not in narrow:
        return list(narrow)
    at = 0
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, at)
        if tag == 1 and at + 4 + size <= len(extra) and size >= 8 * narrow.count(_MAX32):
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            return [next(wide) if value == _MAX32 else value for value in narrow]
        at += 4 + size
    raise _refuse(path, start, "zip64 field of a record is missing")


def _why_no_end(path: str, start: int, nbytes: int) -> str:
    head = read_range(path, start, min(nbytes, len(LEGACY_MAGIC)))
    if head == LEGACY_MAGIC:
        return "written by torch.save before 1.6 (no zip); load and save it once with a newer torch"
    if head.startswith(b"PK\x03\x04"):
        return "torch.save archive has no end record: cut short, or parts of two saves"
    return "no torch.save archive here"


def _refuse(path: str, start: int, what: str) -> FormatError:
    return FormatError(what, where=f"{path} at byte {start}" if start else path, remedy=REMEDY)
