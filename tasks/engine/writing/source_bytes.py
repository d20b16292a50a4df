"""Finding a target's bytes in the source: as runs to copy, or as row bands to assemble.

A *run* is a range of one file whose bytes are a range of the target, in order. Where the fragments are flat ranges of the target (rows:
FSDP, HSDP, expert parallel; any: ZeRO), a target is a few runs. Where they are cut on other dims (TP columns) or stored with strides, a
band of rows is put together from every fragment that touches it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from isal.isal_zlib import crc32

from tasks.engine.formats.reader import CheckpointReader, Payload
from tasks.engine.planning.plan import Input, TensorPlan
from tasks.engine.tensors.catalog import Catalog, Fragment
from tasks.engine.tensors.flat import is_flat
from tasks.engine.tensors.ops import Raw
from tasks.engine.tensors.region import Region
from tasks.engine.writing.crc import CrcPiece, RecordedCrc
from tasks.engine.writing.open_files import OpenFiles
from validators.expectation import ITEMSIZE

COLUMN_BAND_NBYTES = 32 << 20
COLUMN_BLOCK_NBYTES = 4 << 20

CRC_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` bytes from `start` of `path`, which go to the target in this order. They lie in the record that begins at `record`."""

    path: str
    start: int
    nbytes: int
    record: int


class SourceBytes:
    """The values of a checkpoint's tensors, for several threads at once. Close `files` when done.

    Args:
        reader: finds payloads.
        catalog: the reader's.
    """

    def __init__(self, reader: CheckpointReader, catalog: Catalog) -> None:
        self.catalog = catalog
        self.files = OpenFiles()
        self._reader = reader
        self._payloads: dict[Fragment, Payload] = {}

    def payload(self, fragment: Fragment) -> Payload:
        """Return where a fragment's raw values are; asked of the format once.

        Args:
            fragment: of this catalog.

        Returns:
            The payload.
        """
        found = self._payloads.get(fragment)
        if found is None:
            found = self._payloads[fragment] = self._reader.payload(fragment)
        return found

    def recorded(self, fragment: Fragment) -> RecordedCrc | None:
        """Return the checksum that covers a fragment, or None where its writer recorded none.

        Args:
            fragment: of this catalog.

        Returns:
            The checksum and what it covers.
        """
        payload, holds = self.payload(fragment), f"the values of {fragment.fqn}"
        if payload.crc32 is not None:
            return RecordedCrc(holds, payload.path, payload.start, payload.nbytes, payload.crc32)
        record = payload.part_of
        if record is None:
            return None
        return RecordedCrc(f"{holds} and others beside it", payload.path, record.start, record.nbytes, record.crc32)

    def overlapping(self, name: str, want: Region) -> list[Fragment]:
        """Return the fragments that hold some of a box.

        Args:
            name: a source tensor.
            want: the box.

        Returns:
            Fragments in the table's order; those without elements are left out.
        """
        offsets, shapes = self.catalog.boxes(name)
        low, high = np.array(want.offset), np.array(want.stop)
        hit = ((offsets < high) & (offsets + shapes > low) & (shapes > 0)).all(axis=1)
        return list(self.catalog.fragments(name, np.flatnonzero(hit).tolist()))

    def runs(self, tensor: TensorPlan) -> list[Run] | None:
        """Return the target as runs, in order, or None when it must be assembled.

        Args:
            tensor: a target whose op and encoding change nothing.

        Returns:
            Runs whose lengths add up to the target's bytes; no two that follow each other in one record, none in two records.
        """
        made: list[Run] = []
        for source in tensor.inputs:
            found = self.runs_of(source)
            if found is None:
                return None
            for run in found:
                last = made[-1] if made else None
                if last is not None and (last.path, last.record, last.start + last.nbytes) == (run.path, run.record, run.start):
                    made[-1] = Run(last.path, last.start, last.nbytes + run.nbytes, last.record)
                else:
                    made.append(run)
        return made

    def runs_of(self, source: Input) -> list[Run] | None:
        """Return an input's box as runs, in order, or None when it must be assembled.

        Args:
            source: a box of a source tensor.

        Returns:
            Runs whose lengths add up to the box's bytes.
        """
        itemsize = ITEMSIZE[source.dtype]
        placed: list[tuple[int, Run]] = []
        for fragment in self.overlapping(source.name, source.region):
            inside = fragment.region.intersect(source.region)
            assert inside is not None
            payload = self.payload(fragment)
            if payload.strides is not None or not (is_flat(inside, source.region) and is_flat(inside, fragment.region)):
                return None
            offset = _ravel(inside.offset, fragment.region) * itemsize
            record = payload.part_of.start if payload.part_of is not None else payload.start
            run = Run(payload.path, payload.start + offset, inside.numel * itemsize, record)
            placed.append((_ravel(inside.offset, source.region), run))
        return [run for _, run in sorted(placed, key=lambda item: item[0])]

    def read_rows(self, source: Input, row_dim: int, rows: range, pieces: list[CrcPiece]) -> Raw:
        """Assemble a band of rows of an input's box.

        Args:
            source: a box of a source tensor.
            row_dim: the dim that counts as rows; the dims before it have length 1.
            rows: which rows of the box.
            pieces: the CRC of every range of a file that was read is appended.

        Returns:
            (len(rows), …) raw values, C order.
        """
        want = _band(source, row_dim, rows)
        return self._read_region(source, want, pieces).reshape(want.shape[row_dim:])

    def _read_region(self, source: Input, want: Region, pieces: list[CrcPiece]) -> Raw:
        itemsize = ITEMSIZE[source.dtype]
        out = np.empty(want.shape, dtype=f"u{itemsize}")
        for fragment in self.overlapping(source.name, want):
            inside = fragment.region.intersect(want)
            assert inside is not None
            out[inside.within(want)] = self._read_box(fragment, inside, pieces)
        return out

    def read_fragment(self, fragment: Fragment) -> Raw:
        """Return all values of a fragment, or of a replica.

        Args:
            fragment: of this catalog.

        Returns:
            Raw values in the fragment's shape.
        """
        return self._read_box(fragment, fragment.region, [])

    def read_crc(self, path: str, start: int, nbytes: int) -> int:
        """Return the CRC32 of a range of a file, read in pieces.

        Args:
            path: the file.
            start: first byte.
            nbytes: how many.

        Returns:
            The checksum.
        """
        crc, buffer = 0, bytearray(CRC_NBYTES)
        for at in range(0, nbytes, CRC_NBYTES):
            view = memoryview(buffer)[: min(CRC_NBYTES, nbytes - at)]
            self.files.read_into(path, start + at, view)
            crc = crc32(view, crc)
        return crc

    def _read_box(self, fragment: Fragment, inside: Region, pieces: list[CrcPiece]) -> Raw:
        payload = self.payload(fragment)
        itemsize = ITEMSIZE[fragment.dtype]
        strides = payload.strides or _c_strides(fragment.region.shape)
        local = tuple(o - base for o, base in zip(inside.offset, fragment.region.offset, strict=True))
        first = sum(o * s for o, s in zip(local, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(inside.shape, strides, strict=True))
        span = np.empty(last - first + 1, dtype=f"u{itemsize}")
        view = span.view(np.uint8).data
        start = payload.start + first * itemsize
        self.files.read_into(payload.path, start, view)
        pieces.append(CrcPiece(payload.path, start, len(view), crc32(view)))
        return np.lib.stride_tricks.as_strided(span, inside.shape, [s * itemsize for s in strides], writeable=False)

    def bands(self, tensor: TensorPlan, band_nbytes: int, pieces: list[CrcPiece]) -> Iterator[Raw]:
        """Yield the values that feed a target, before its op, in bands of whole rows.

        Args:
            tensor: a target.
            band_nbytes: about how many bytes a band takes.
            pieces: see `read_rows`.

        Yields:
            (rows, …) raw values; rows is a multiple of the op's `band_rows`. A 0-d target yields one 0-d value. A target that is transposed
            yields (…, columns), all its inputs below each other.
        """
        unit = tensor.op.band_rows
        if tensor.op.band_dim:
            yield from self._column_bands(tensor, pieces)
            return
        for source in tensor.inputs:
            row_dim = len(source.shape) - len(tensor.shape)
            if not tensor.shape:
                yield self.read_rows(source, row_dim, range(1), pieces)
                continue
            row_nbytes = prod(source.shape[row_dim + 1 :]) * ITEMSIZE[source.dtype]
            count = max(1, band_nbytes // max(row_nbytes * unit, 1)) * unit
            total = source.shape[row_dim]
            for start in range(0, total, count):
                yield self.read_rows(source, row_dim, range(start, min(start + count, total)), pieces)

    def _column_bands(self, tensor: TensorPlan, pieces: list[CrcPiece]) -> Iterator[Raw]:
        # Every band passes over the whole matrix, so bands are wide; each is read in blocks of rows, so that no gap is held for long.
        itemsize = ITEMSIZE[tensor.inputs[0].dtype]
        height, width = sum(source.shape[0] for source in tensor.inputs), tensor.inputs[0].shape[1]
        count = max(1, COLUMN_BAND_NBYTES // max(height * itemsize, 1))
        for start in range(0, width, count):
            band = np.empty((height, min(count, width - start)), dtype=f"u{itemsize}")
            row = 0
            for source in tensor.inputs:
                step = max(1, COLUMN_BLOCK_NBYTES // max(source.full_shape[1] * itemsize, 1))
                for first in range(0, source.shape[0], step):
                    rows = min(step, source.shape[0] - first)
                    offset = (source.offset[0] + first, source.offset[1] + start)
                    band[row : row + rows] = self._read_region(source, Region(offset, (rows, band.shape[1])), pieces)
                    row += rows
            yield band


def _band(source: Input, row_dim: int, rows: range) -> Region:
    if row_dim == len(source.shape):
        return source.region
    offset = list(source.offset)
    shape = list(source.shape)
    offset[row_dim] += rows.start
    shape[row_dim] = len(rows)
    return Region(tuple(offset), tuple(shape))


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def _ravel(index: tuple[int, ...], region: Region) -> int:
    return sum((i - o) * s for i, o, s in zip(index, region.offset, _c_strides(region.shape), strict=True))
