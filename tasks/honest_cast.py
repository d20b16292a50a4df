"""A cast made by torch alone: the merged values in the dtypes of the release, to measure what a sound cast costs.

It is made from the merged folder, tensor by tensor and piece by piece, and shares nothing with the engine. The files are the merged
folder's, with the same names, so that transformers loads them the same way.
"""

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from reports.errors import FormatError
from tasks.measure import DTYPES
from tasks.witnesses.boxes import read_bytes
from validators.release import StoredTensor, WeightFile, open_release

_PIECE_NUMEL = 1 << 20


def write_honest_cast(merged: Path, release: Path, folder: Path) -> Path:
    """Write the merged values, each tensor cast to the dtype the release stores it in.

    Args:
        merged: the values before any cast.
        release: names the dtypes; its values are not read.
        folder: where to; made.

    Returns:
        `folder`, with the merged folder's other files beside the weights.

    Raises:
        FormatError: the release lacks a tensor, or a dtype is unknown.
    """
    folder.mkdir(parents=True)
    dtypes = {tensor.name: tensor.dtype for tensor in open_release(release).stored()}
    source = open_release(merged)
    for file in source.files:
        _cast_file(merged, file, dtypes, folder / file.name)
    for name in source.others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(merged / name, folder / name)
    return folder


def _cast_file(merged: Path, file: WeightFile, dtypes: Mapping[str, str], target: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in file.tensors:
        code = dtypes.get(tensor.name, "")
        if code not in DTYPES or tensor.dtype not in DTYPES:
            raise FormatError(f"no dtype to cast {tensor.dtype} to: {code!r}", where=tensor.name)
        nbytes = prod(tensor.shape) * DTYPES[code].itemsize
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with (merged / file.name).open("rb", buffering=0) as source, target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in file.tensors:
            for piece in _read_pieces(source.fileno(), merged / file.name, file.data_start, tensor):
                out.write(piece.to(DTYPES[dtypes[tensor.name]]).view(torch.uint8).numpy().data)


def _read_pieces(fd: int, path: Path, data_start: int, tensor: StoredTensor) -> Iterator[torch.Tensor]:
    dtype = DTYPES[tensor.dtype]
    size = _PIECE_NUMEL * dtype.itemsize
    starts = range(tensor.start, tensor.stop, size)
    return (read_bytes(fd, path, data_start + at, min(size, tensor.stop - at)).view(dtype) for at in starts)
