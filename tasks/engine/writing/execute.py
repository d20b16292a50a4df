"""Writing one file of a plan.

`Verify.FULL` digests what is written and checks the source's checksums in the same pass. `Verify.NONE` only moves bytes; it exists to
measure the machine's limit, and nothing written with it can be published (the stage asks for a digest).
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from tasks.engine.containers.safetensors_header import format_header
from tasks.engine.encodings.cast import encode_cast
from tasks.engine.planning.plan import FilePlan, TensorPlan
from tasks.engine.tensors.ops import apply_op
from tasks.engine.writing.crc import CrcPiece, RecordedCrc, verify_pieces
from tasks.engine.writing.pipeline import OrderedWriter
from tasks.engine.writing.quantize import PartWriter
from tasks.engine.writing.source_bytes import Run, SourceBytes

BAND_NBYTES = 2 << 20


class Verify(Enum):
    """Whether bytes are digested and checked while they move."""

    FULL = "full"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What was written: `pieces` are checksums of what was read of records that this file shares with others; `flushed` counts, per
    tensor, non-zero values that a cast made zero.
    """

    name: str
    nbytes: int
    sha256: str
    pieces: tuple[CrcPiece, ...] = ()
    flushed: tuple[tuple[str, int], ...] = ()


Progress = Callable[[int], None]


def execute_file(
    file: FilePlan,
    source: SourceBytes,
    path: Path,
    *,
    verify: Verify = Verify.FULL,
    progress: Progress | None = None,
    with_helper: bool = True,
    header: bytes = b"",
) -> FileRecord:
    """Write one file of a plan; an existing file is overwritten.

    Args:
        file: what to write.
        source: where from.
        path: where to.
        verify: whether to digest and check on the way.
        progress: called with the number of bytes written since the last call.
        with_helper: whether a second thread computes the digest; of use where fewer files are written at a time than there are cores.
        header: of a file that is no safetensors, as long as planned.

    Returns:
        The record of the file.

    Raises:
        FormatError: a source file is short, unreadable, or its checksum disagrees.
        EncodingError: values do not fit the dtype.
        OSError: the disk is full or failing.
    """
    writer_progress = progress or (lambda _: None)
    pieces: list[CrcPiece] = []
    flushed: dict[str, int] = {}
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with OrderedWriter(fd, with_digest=verify is Verify.FULL, with_helper=with_helper) as writer:
            writer.put(memoryview(header or format_header([tensor.spec for tensor in file.tensors])))
            writer_progress(file.header_nbytes)
            _write_tensors(file, source, writer, verify, pieces, flushed, writer_progress)
            digest = writer.finish()
    finally:
        os.close(fd)
    left: list[CrcPiece] = []
    if verify is Verify.FULL:
        left = verify_pieces(_recorded((file,), source), pieces, None)
    return FileRecord(file.name, file.nbytes, digest, tuple(left), tuple(flushed.items()))


def verify_shared(files: tuple[FilePlan, ...], records: tuple[FileRecord, ...], source: SourceBytes) -> None:
    """Check the source checksums of records that several output files share, once all are written.

    Args:
        files: the plan's files.
        records: one per file.
        source: where they were written from.

    Raises:
        FormatError: a checksum disagrees.
    """
    pieces = [piece for record in records for piece in record.pieces]
    if not pieces:
        return
    verify_pieces(_recorded(files, source), pieces, source.read_crc)


def _write_tensors(
    file: FilePlan,
    source: SourceBytes,
    writer: OrderedWriter,
    verify: Verify,
    pieces: list[CrcPiece],
    flushed: dict[str, int],
    progress: Progress,
) -> None:
    at = file.header_nbytes
    with PartWriter(source, BAND_NBYTES) as parts:
        for tensor in file.tensors:
            _put(writer, progress, memoryview(bytes(tensor.span[0] - at)))
            at = tensor.span[1]
            if tensor.part is not None:
                lost = parts.write(tensor, partial(_put, writer, progress), pieces)
            else:
                lost = _write_tensor(tensor, source, writer, verify, pieces, progress)
            if lost:
                flushed[tensor.name] = lost
    _put(writer, progress, memoryview(bytes(file.nbytes - at)))


def _write_tensor(
    tensor: TensorPlan, source: SourceBytes, writer: OrderedWriter, verify: Verify, pieces: list[CrcPiece], progress: Progress
) -> int:
    moves_only = tensor.op.name == "same" and tensor.encoding == "copy"
    runs = source.runs(tensor) if moves_only else None
    if runs is None:
        return _write_bands(tensor, source, writer, pieces, progress)
    for run in runs:
        crc = _stream_run(run, source, writer, verify, progress)
        if verify is Verify.FULL:
            pieces.append(CrcPiece(run.path, run.start, run.nbytes, crc))
    return 0


def _stream_run(run: Run, source: SourceBytes, writer: OrderedWriter, verify: Verify, progress: Progress) -> int:
    crc, at = 0, 0
    while at < run.nbytes:
        view = writer.space()[: run.nbytes - at]
        source.files.read_into(run.path, run.start + at, view)
        if verify is Verify.FULL:
            crc = crc32(view, crc)
        writer.advance(len(view))
        progress(len(view))
        at += len(view)
    return crc


def _write_bands(tensor: TensorPlan, source: SourceBytes, writer: OrderedWriter, pieces: list[CrcPiece], progress: Progress) -> int:
    flushed = 0
    for band in source.bands(tensor, BAND_NBYTES, pieces):
        rows = np.ascontiguousarray(apply_op(tensor.op, band))
        if tensor.encoding == "cast":
            rows, lost = encode_cast(tensor.name, rows, tensor.inputs[0].dtype, tensor.dtype)
            flushed += lost
        _put(writer, progress, rows.reshape(-1).view(np.uint8).data)
    return flushed


def _put(writer: OrderedWriter, progress: Progress, view: memoryview) -> None:
    writer.put(view)
    progress(len(view))


def _recorded(files: Iterable[FilePlan], source: SourceBytes) -> set[RecordedCrc]:
    # One per record: of those that hold many tensors, the words of the first that was met.
    found: dict[tuple[str, int], RecordedCrc] = {}
    for tensor in (tensor for file in files for tensor in file.tensors):
        for box in tensor.inputs:
            for fragment in source.overlapping(box.name, box.region):
                recorded = source.recorded(fragment)
                if recorded is not None:
                    found.setdefault((recorded.path, recorded.start), recorded)
    return set(found.values())
