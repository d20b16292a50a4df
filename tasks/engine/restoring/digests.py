"""Reading every byte of a checkpoint: one digest per tensor and per object, whatever the number of parts it is in.

A tensor's digest is the sha256 of its values in C order, so two checkpoints cut in different ways agree. Checksums that the writer
recorded are verified in the same pass. What cannot be read as promised is a `Damage`, and the reading goes on.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from reports.errors import CoverageError, FormatError, ReplicaError
from tasks.engine.containers.ranges import read_range
from tasks.engine.containers.torch_zip import open_archive
from tasks.engine.planning.plan import Input
from tasks.engine.restoring.facts import known_shape
from tasks.engine.tensors.catalog import StateItem
from tasks.engine.writing.crc import CrcPiece, RecordedCrc, verify_pieces
from tasks.engine.writing.replicas import check_copies
from tasks.engine.writing.source_bytes import Run, SourceBytes
from validators.drills.evidence import Damage
from validators.drills.facts import Entry
from validators.expectation import ITEMSIZE

CHUNK_NBYTES = 4 << 20
_ZIP = b"PK\x03\x04"
Progress = Callable[[int], None]


def digest_entries(
    source: SourceBytes, entries: Sequence[Entry], workers: int, progress: Progress = lambda _: None
) -> tuple[dict[str, Entry], tuple[Damage, ...]]:
    """Read everything.

    Args:
        source: the checkpoint.
        entries: what its catalog lists.
        workers: how many are read at a time.
        progress: told of bytes read.

    Returns:
        All entries, those that could be read with their digests, and what could not be read.
    """
    items = {item.fqn: item for item in source.catalog.state}

    shared: list[tuple[set[RecordedCrc], list[CrcPiece]]] = []

    def read(entry: Entry) -> Entry | Damage:
        try:
            if entry.role == "object":
                found = replace(entry, digest=_digest_item(source, items[entry.key]))
            else:
                found, left = _digest_tensor(source, entry)
                shared.append(left)
        except (FormatError, CoverageError) as error:
            return Damage(entry.key, str(error))
        progress(entry.nbytes)
        return found

    with ThreadPoolExecutor(workers) as pool:
        read_ones = list(pool.map(read, entries))
    damage = [found for found in read_ones if isinstance(found, Damage)]
    try:
        _verify_shared(source, shared)
        check_copies(source)
    except (ReplicaError, FormatError) as error:
        damage.append(Damage(error.where, str(error)))
    kept = [found if isinstance(found, Entry) else entry for found, entry in zip(read_ones, entries, strict=True)]
    return {entry.key: entry for entry in kept}, tuple(damage)


def _digest_tensor(source: SourceBytes, entry: Entry) -> tuple[Entry, tuple[set[RecordedCrc], list[CrcPiece]]]:
    # With the pieces of records that other tensors share, for when all are read.
    catalog = source.catalog
    tensor = catalog.tensor(entry.key)
    shape = known_shape(catalog, tensor)
    catalog.check_coverage(entry.key, shape)
    box = Input(entry.key, (0,) * len(shape), shape, tensor.dtype, shape)
    digest, is_zero, pieces = hashlib.sha256(), True, []
    for view, piece in _views(source, box):
        digest.update(view)
        is_zero = is_zero and not np.frombuffer(view, dtype=np.uint8).any()
        pieces += piece
    recorded = {crc for fragment in catalog.fragments(entry.key) if (crc := source.recorded(fragment)) is not None}
    left = verify_pieces(recorded, pieces, None)
    return replace(entry, digest=digest.hexdigest(), is_zero=is_zero and entry.nbytes > 0), (recorded, left)


def _verify_shared(source: SourceBytes, shared: Sequence[tuple[set[RecordedCrc], list[CrcPiece]]]) -> None:
    # A record's words differ from tensor to tensor: one of them is enough.
    records = {(record.path, record.start): record for recorded, left in shared if left for record in recorded}
    pieces = [piece for _, left in shared for piece in left]
    verify_pieces(records.values(), pieces, lambda path, start, nbytes: crc32(_read(source, path, start, nbytes)))


def _views(source: SourceBytes, box: Input) -> Iterator[tuple[memoryview, list[CrcPiece]]]:
    # The tensor's bytes in C order, with the CRC of each payload range read.
    runs = source.runs_of(box)
    if runs is not None:
        for run in runs:
            yield from _run_views(source, run)
        return
    rows = max(1, CHUNK_NBYTES // max(1, prod(box.shape[1:]) * ITEMSIZE[box.dtype]))
    for start in range(0, box.shape[0], rows):
        pieces: list[CrcPiece] = []
        band = np.ascontiguousarray(source.read_rows(box, 0, range(start, min(start + rows, box.shape[0])), pieces))
        yield band.reshape(-1).view(np.uint8).data, pieces


def _run_views(source: SourceBytes, run: Run) -> Iterator[tuple[memoryview, list[CrcPiece]]]:
    for at in range(0, run.nbytes, CHUNK_NBYTES):
        nbytes = min(CHUNK_NBYTES, run.nbytes - at)
        view = _read(source, run.path, run.start + at, nbytes)
        yield view, [CrcPiece(run.path, run.start + at, nbytes, crc32(view))]


def _digest_item(source: SourceBytes, item: StateItem) -> str:
    # Of its stored bytes; of its value where the catalog has that in place of a place of its own.
    if not item.places:
        return hashlib.sha256(repr(item.value).encode()).hexdigest() if item.value is not None else ""
    digest = hashlib.sha256()
    for place in item.places:
        path = str(Path(source.catalog.root) / place.path)
        for at in range(0, place.nbytes, CHUNK_NBYTES):
            digest.update(_read(source, path, place.start + at, min(CHUNK_NBYTES, place.nbytes - at)))
        if read_range(path, place.start, min(4, place.nbytes)) == _ZIP:
            archive = open_archive(path, place.start, place.nbytes)
            for name in archive.records if archive.has_crc32 else ():
                archive.verify(name)
    return digest.hexdigest()


def _read(source: SourceBytes, path: str, start: int, nbytes: int) -> memoryview:
    view = memoryview(bytearray(nbytes))
    source.files.read_into(path, start, view)
    return view
