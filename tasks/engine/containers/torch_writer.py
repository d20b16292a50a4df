"""Writing one tensor as torch.save would, in pieces: the values pass through and are never held whole.

Source: torch 2.13, torch/serialization.py (`_save`: data.pkl, byteorder, data/0, version), caffe2/serialize/inline_container.cc (values
begin at a multiple of 64 bytes, by an extra field "FB").
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch

_ALIGNMENT = 64
_LOCAL_HEADER_NBYTES, _ZIP64_NBYTES = 30, 20
_EPOCH = (1980, 1, 1, 0, 0, 0)
_STORAGES = {"F32": torch.FloatStorage, "BF16": torch.BFloat16Storage, "F16": torch.HalfStorage, "F64": torch.DoubleStorage}


class _Storage:
    def __init__(self, kind: type, numel: int) -> None:
        self.persistent = ("storage", kind, "0", "cpu", numel)


class _Tensor:
    # Pickles as the call that builds a tensor of this shape over the one storage.
    def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        self._arguments: tuple[object, ...] = (storage, 0, shape, strides, False, OrderedDict())

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return torch._utils._rebuild_tensor_v2, self._arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return value.persistent if isinstance(value, _Storage) else None


def write_tensor(path: Path, code: str, shape: tuple[int, ...], chunks: Iterable[memoryview], *, key: str = "", **beside: int) -> None:
    """Write a tensor as a torch.save file.

    Args:
        path: a new file.
        code: dtype as safetensors code.
        shape: of the tensor.
        chunks: its values in C order, little-endian.
        key: under which key of a dict the tensor is saved; "" for the tensor alone.
        **beside: plain values beside it in that dict.

    Raises:
        KeyError: a dtype that optimizers do not have.
        OSError: the disk is full or failing.
    """
    tensor = _Tensor(_Storage(_STORAGES[code], prod(shape)), shape)
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump({**beside, key: tensor} if key else tensor)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl", _EPOCH), pickled.getvalue())
        archive.writestr(zipfile.ZipInfo("archive/byteorder", _EPOCH), b"little")
        info = zipfile.ZipInfo("archive/data/0", _EPOCH)
        assert archive.fp is not None
        behind = archive.fp.tell() + _LOCAL_HEADER_NBYTES + len(info.filename) + _ZIP64_NBYTES + 4
        padding = -behind % _ALIGNMENT
        info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
        with archive.open(info, "w", force_zip64=True) as record:
            for chunk in chunks:
                record.write(chunk)
        archive.writestr(zipfile.ZipInfo("archive/version", _EPOCH), b"3\n")
