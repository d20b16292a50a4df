"""A release held against the low-precision copies that its source keeps beside the masters: each master, rounded, is its copy."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from reports.model import Witness
from tasks.measure import DTYPES, flat_index
from tasks.tally import Difference
from tasks.witnesses.boxes import read_box
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.second_copy import COMPARABLE, SecondCopy, find_copies
from validators.release import StoredTensor, open_release
from validators.tables import SECOND_COPY, ValueTable

_PIECE_NUMEL = 1 << 19


def measure_copies(folder: Path, *, plan_path: Path, source_roots: tuple[Path, ...], workers: int) -> tuple[pd.DataFrame, Witness | None]:
    """Hold a release against its source's second copies.

    Args:
        folder: the release.
        plan_path: the plan it was written by.
        source_roots: the source's folders, the main one first.
        workers: how many tensors are read at the same time.

    Returns:
        A ValueTable, empty where the witness is not heard, and the witness; None for formats that never hold weights twice.

    Raises:
        FormatError: the source is damaged.
        CoverageError: a copy is not whole.
    """
    rows: list[dict[str, object]] = []
    columns = list(ValueTable.to_schema().columns)
    source = json.loads(plan_path.read_text(encoding="utf-8"))["source"]
    if find_copies(source["format"], of_masters=source.get("weights") == "master") is None:
        return pd.DataFrame(rows, columns=columns), None
    try:
        witness = SecondCopy(plan_path, source_roots)
    except NotHeardError as reason:
        return pd.DataFrame(rows, columns=columns), Witness(SECOND_COPY, False, ("bytes",), str(reason))
    jobs = list(_jobs(folder, witness))
    with ThreadPoolExecutor(workers) as pool:
        rows += [row for row in pool.map(lambda job: _compare(folder, job[0], job[1], witness), jobs) if row is not None]
    if not rows:
        return pd.DataFrame(rows, columns=columns), Witness(
            SECOND_COPY, False, ("bytes",), "the release's dtype cannot hold the copies' values"
        )
    said = f"{len(rows)} tensors are the masters of the copies in {source_roots[0].name}"
    return ValueTable.validate(pd.DataFrame(rows, columns=columns)), Witness(SECOND_COPY, True, ("bytes",), said)


def _jobs(folder: Path, witness: SecondCopy) -> Iterator[tuple[StoredTensor, int]]:
    for file in open_release(folder).files:
        for tensor in file.tensors:
            target = witness.targets.get(tensor.name)
            if (
                target is not None
                and target.shape == tensor.shape
                and tensor.dtype in COMPARABLE
                and file.data_start + tensor.stop <= file.nbytes
            ):
                yield tensor, file.data_start + tensor.start


def _compare(folder: Path, tensor: StoredTensor, start: int, witness: SecondCopy) -> dict[str, object] | None:
    difference, dtype, path = Difference(), DTYPES[tensor.dtype], folder / tensor.file
    with path.open("rb", buffering=0) as file:
        for piece in witness.pieces(tensor.name, _PIECE_NUMEL):
            if _code(piece.values.dtype) not in COMPARABLE[tensor.dtype]:
                return None
            found = read_box(file.fileno(), path, start, dtype, tensor.shape, piece.box)
            narrow = min((found.dtype, piece.values.dtype), key=lambda d: d.itemsize)
            rounded, copy = found.to(narrow).contiguous(), piece.values.to(narrow)
            difference.add(rounded, copy, 0.0, partial(flat_index, piece.box, tensor.shape))
    return difference.as_row(tensor.name, SECOND_COPY)


def _code(dtype: torch.dtype) -> str:
    return next((code for code, known in DTYPES.items() if known == dtype), "")
