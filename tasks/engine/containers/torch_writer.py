"""Writing tensors as torch.save would, in pieces: the values pass through and are never held whole.

Source: torch 2.13, torch/serialization.py (`_save`: data.pkl, byteorder, data/0, version), caffe2/serialize/inline_container.cc (values
begin at a multiple of 64 bytes, by an extra field "FB").
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

_ALIGNMENT = 64
_LOCAL_HEADER_NBYTES, _ZIP64_NBYTES = 30, 20
_EPOCH = (1980, 1, 1, 0, 0, 0)
_STORAGES = {"F32": torch.FloatStorage, "BF16": torch.BFloat16Storage, "F16": torch.HalfStorage, "F64": torch.DoubleStorage}


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A tensor in an object that is written, whose values come after it; `code` is its dtype as safetensors code."""

    code: str
    shape: tuple[int, ...]


class _Storage:
    def __init__(self, kind: type, number: int, numel: int) -> None:
        self.persistent = ("storage", kind, str(number), "cpu", numel)


class _Pickler(pickle.Pickler):
    # Each Later pickles as the call that builds a tensor of its shape over a storage of its own.
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Later] = []

    def persistent_id(self, value: object) -> object:
        return value.persistent if isinstance(value, _Storage) else None

    def reducer_override(self, value: object) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        if not isinstance(value, Later):
            return NotImplemented  # type: ignore[no-any-return]  # pickle's word for "as you would without me"
        shape = value.shape
        storage = _Storage(_STORAGES[value.code], len(self.tensors), prod(shape))
        self.tensors.append(value)
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict())


class StateWriter:
    """Writes an object as one torch.save file: first all but the values, then those of its tensors, one after the other.

    Args:
        path: a new file.
        held: dicts, lists and plain values, with a Later in the place of each tensor.

    Raises:
        KeyError: a dtype that this writer has not.
        OSError: the disk is full or failing.
    """

    def __init__(self, path: Path, held: object) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(held)
        self._num_tensors, self._written = len(pickler.tensors), 0
        self._archive = zipfile.ZipFile(path, "x", zipfile.ZIP_STORED)
        self._archive.writestr(zipfile.ZipInfo("archive/data.pkl", _EPOCH), pickled.getvalue())
        self._archive.writestr(zipfile.ZipInfo("archive/byteorder", _EPOCH), b"little")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        try:
            if kind is None:
                assert self._written == self._num_tensors, f"{self._written} of {self._num_tensors} tensors written"
                self._archive.writestr(zipfile.ZipInfo("archive/version", _EPOCH), b"3\n")
        finally:
            self._archive.close()

    def write(self, chunks: Iterable[memoryview]) -> None:
        """Write the values of the next tensor, in the order in which they stand in the object.

        Args:
            chunks: values in C order, little-endian.

        Raises:
            OSError: the disk is full or failing.
        """
        info = zipfile.ZipInfo(f"archive/data/{self._written}", _EPOCH)
        assert self._archive.fp is not None
        behind = self._archive.fp.tell() + _LOCAL_HEADER_NBYTES + len(info.filename) + _ZIP64_NBYTES + 4
        padding = -behind % _ALIGNMENT
        info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
        with self._archive.open(info, "w", force_zip64=True) as record:
            for chunk in chunks:
                record.write(chunk)
        self._written += 1


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
    tensor = Later(code, shape)
    with StateWriter(path, {**beside, key: tensor} if key else tensor) as writer:
        writer.write(chunks)
