"""Every released tensor, re-read from disk once: its statistics, and the exact comparison with a witness in the same reading.

Files are read through `pread` into small buffers, never through a mapping that stays open; no more than one piece per worker is in
memory. The tables come in the order of the release, whatever the number of workers.
"""

import math
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from reports.model import Witness
from tasks.dequantize import measure_parts
from tasks.sketch import Rows, Sample
from tasks.tally import Difference, Indices, Scratch, Tally
from tasks.threads import one_torch_thread
from tasks.witnesses.boxes import Box, read_box, read_bytes
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.second_path import SecondPath, Target
from validators.measured import is_router, role_of
from validators.quantization import encoded_names
from validators.release import StoredTensor, open_release
from validators.sampled import MAX_EXPERTS, count_slices
from validators.tables import PartTable, TensorTable, ValueTable, format_shape

_PIECE_NUMEL = 1 << 20  # fewer and longer calls: below 2**19 two workers wait for each other, above 2**20 pieces leave the cache
_BAND_NBYTES = 4 << 20

_worker = threading.local()  # of the thread pool: `scratch`

# Torch's name of each safetensors dtype code.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one reading of a release gave: a TensorTable, a ValueTable (no rows when no witness was heard), a PartTable, and the witness."""

    tensors: pd.DataFrame
    values: pd.DataFrame
    parts: pd.DataFrame
    witness: Witness


@dataclass(frozen=True, slots=True)
class _Job:
    # One released tensor; `data_start` is where its file's data section begins, `intact` whether its bytes can be read as declared.
    folder: Path
    tensor: StoredTensor
    data_start: int
    intact: bool

    @property
    def path(self) -> Path:
        return self.folder / self.tensor.file

    @property
    def start(self) -> int:
        return self.data_start + self.tensor.start


def measure(
    folder: Path, *, plan_path: Path | None, source_roots: tuple[Path, ...], workers: int, without: frozenset[str] = frozenset()
) -> Measurement:
    """Read every tensor of a release once, and hold it against the source's values where the second path can be heard.

    Args:
        folder: the release.
        plan_path: the plan it was written by; None when there is none.
        source_roots: the source's folders, the main one first.
        workers: how many tensors are read at the same time.
        without: weight files that are not read.

    Returns:
        The tables, in the order of the release's files and offsets, and whether the witness was heard.

    Raises:
        FormatError: the source is damaged.
        CoverageError: the source does not hold all of a target.
        UnmappedError: the source lacks a tensor the plan names.
    """
    witness, said = hear(plan_path, source_roots)
    release = open_release(folder)
    encoded = encoded_names(release)
    jobs = [
        _Job(folder, tensor, file.data_start, _is_intact(tensor, file.nbytes - file.data_start))
        for file in release.files
        if file.name not in without
        for tensor in file.tensors
    ]
    largest_first = sorted(range(len(jobs)), key=lambda i: jobs[i].tensor.start - jobs[i].tensor.stop)
    with one_torch_thread(), ThreadPoolExecutor(workers, initializer=_start_worker) as pool:
        futures = {i: pool.submit(_measure_tensor, jobs[i], None if jobs[i].tensor.name in encoded else witness) for i in largest_first}
        try:
            rows = [futures[i].result() for i in range(len(jobs))]
        finally:
            pool.shutdown(cancel_futures=True)
    tensors = pd.DataFrame([row for row, _ in rows], columns=list(TensorTable.to_schema().columns))
    values = pd.DataFrame([row for _, row in rows if row is not None], columns=list(ValueTable.to_schema().columns))
    parts = pd.DataFrame(measure_parts(release, witness, workers), columns=list(PartTable.to_schema().columns))
    return Measurement(TensorTable.validate(tensors), ValueTable.validate(values), PartTable.validate(parts), said)


def _start_worker() -> None:
    _worker.scratch = Scratch()


def hear(plan_path: Path | None, source_roots: tuple[Path, ...]) -> tuple[SecondPath | None, Witness]:
    """Return the second path of a plan.

    Args:
        plan_path: the plan; None where there is none.
        source_roots: the source's folders, the main one first.

    Returns:
        The witness, or None, and what is said of it.

    Raises:
        FormatError: the source is damaged.
    """
    name, proves = SecondPath.name, ("bytes",)
    if plan_path is None:
        return None, Witness(name, False, proves, "no plan: the source's tensors cannot be matched to the release's")
    try:
        witness = SecondPath(plan_path, source_roots)
    except NotHeardError as reason:
        return None, Witness(name, False, proves, str(reason))
    return witness, Witness(name, True, proves, f"{len(witness.targets)} tensors derived a second time from {source_roots[0].name}")


def _is_intact(tensor: StoredTensor, data_nbytes: int) -> bool:
    dtype = DTYPES.get(tensor.dtype)
    return dtype is not None and tensor.stop - tensor.start == prod(tensor.shape) * dtype.itemsize and tensor.stop <= data_nbytes


def _measure_tensor(job: _Job, witness: SecondPath | None) -> tuple[dict[str, object], dict[str, object] | None]:
    tally, difference = Tally(_worker.scratch), Difference(_worker.scratch)
    sample = Sample(job.tensor.shape, count_slices(job.tensor.name, job.tensor.shape))
    rows = Rows(job.tensor.shape) if _has_rows(job.tensor) else None
    target = witness.targets.get(job.tensor.name) if witness else None
    comparable = target is not None and (target.shape, target.dtype) == (job.tensor.shape, job.tensor.dtype)
    if job.intact:
        dtype = DTYPES[job.tensor.dtype]
        with job.path.open("rb", buffering=0) as file:
            for box, source in _pieces(job, witness if comparable else None):
                found = read_box(file.fileno(), job.path, job.start, dtype, job.tensor.shape, box).contiguous()
                zeros = tally.zeros
                squares = tally.add(found)
                sample.add(found, box)
                if rows is not None:
                    rows.add(found, box, tally.zeros - zeros)
                if source is not None:
                    difference.add(found, source, squares, partial(flat_index, box, job.tensor.shape))
    compared = comparable and job.intact
    row = _tensor_row(job, tally, difference.relative_error if compared else math.nan)
    row |= {"sample": sample.text, "repeated": rows.text if rows is not None and job.intact else ""}
    if witness is None or target is None:
        return row, None
    if not compared:
        numel = prod(target.shape)
        difference = Difference(numel=numel, differing=numel, first=0 if numel else -1, max_abs=math.nan)
    return row, _value_row(job, witness, target, difference)


def _has_rows(tensor: StoredTensor) -> bool:
    # Tables of one row per token or position, the matrices outside the layers; and of one row per expert.
    is_table = role_of(tensor.name) == tensor.name or (is_router(tensor.name) and tensor.shape[0] <= MAX_EXPERTS)
    return len(tensor.shape) == 2 and tensor.stop > tensor.start and is_table


def _pieces(job: _Job, witness: SecondPath | None) -> Iterator[tuple[Box, torch.Tensor | None]]:
    if witness is None:
        whole = Box((0,) * len(job.tensor.shape), job.tensor.shape)
        yield from ((box, None) for box in whole.cut(_PIECE_NUMEL))
    else:
        yield from ((piece.box, piece.values) for piece in witness.pieces(job.tensor.name, _PIECE_NUMEL))


def flat_index(box: Box, shape: tuple[int, ...]) -> Indices:
    """Return the flat index in a tensor of each element of a box.

    Args:
        box: of the tensor.
        shape: the tensor's.

    Returns:
        Indices, in the box's C order.
    """
    axes = [np.arange(o, o + n, dtype=np.int64) * prod(shape[d + 1 :]) for d, (o, n) in _dims(box)]
    return np.asarray(sum(np.ix_(*axes)) if axes else 0, dtype=np.int64).reshape(-1)


def _tensor_row(job: _Job, tally: Tally, relative_error: float) -> dict[str, object]:
    return {
        "name": job.tensor.name,
        "file": job.tensor.file,
        "dtype": job.tensor.dtype,
        "shape": format_shape(job.tensor.shape),
        "nbytes": max(0, job.tensor.stop - job.tensor.start),
        **tally.as_columns(),
        "relative_error": relative_error,
    }


def _value_row(job: _Job, witness: SecondPath, target: Target, difference: Difference) -> dict[str, object]:
    differs = difference.differing > 0
    return difference.as_row(
        job.tensor.name,
        witness.name,
        expected_crc32=_expected_crc32(witness, target) if differs else -1,
        found_crc32=_found_crc32(job) if differs and job.intact else -1,
    )


def _expected_crc32(witness: SecondPath, target: Target) -> int:
    # The witness's pieces come in the order of its files, so whole bands of rows are put together first.
    dtype = DTYPES[target.dtype]
    rows = target.shape[0] if target.shape else 1
    row_shape = target.shape[1:]
    band = max(1, _BAND_NBYTES // max(1, prod(row_shape) * dtype.itemsize))
    crc = 0
    for start in range(0, rows, band):
        stop = min(rows, start + band)
        values = torch.empty((stop - start, *row_shape) if target.shape else (), dtype=dtype)
        for piece in witness.pieces(target.name, _PIECE_NUMEL, rows=(start, stop)):
            at = tuple(slice(o - (start if d == 0 else 0), o - (start if d == 0 else 0) + n) for d, (o, n) in _dims(piece.box))
            values[at] = piece.values.to(dtype)
        crc = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().data, crc)
    return crc


def _dims(box: Box) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(box.offset, box.shape, strict=True))


def _found_crc32(job: _Job) -> int:
    crc = 0
    nbytes = job.tensor.stop - job.tensor.start
    with job.path.open("rb", buffering=0) as file:
        for at in range(0, nbytes, _BAND_NBYTES):
            band = read_bytes(file.fileno(), job.path, job.start + at, min(_BAND_NBYTES, nbytes - at))
            crc = zlib.crc32(band.numpy().data, crc)
    return crc
