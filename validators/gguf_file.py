"""A GGUF file as its header describes it: metadata and tensors. Its own reader; reads no tensor byte.

Layout, little-endian: magic, version, counts; key-values; per tensor its name, dims (the fastest first), type and offset; padding to
the alignment; the data section, in which each tensor starts on the alignment. Source: ggml docs/gguf.md, version 3.

What is larger than the file, or nested without end, is refused before memory is taken for it.
"""

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless general.alignment says otherwise
SUFFIX = ".gguf"
MAX_NUMEL = 2**48
_MAX_DIMS = 4
_MAX_DEPTH = 2  # arrays of arrays

GgufValue = bool | int | float | str | tuple["GgufValue", ...]


@dataclass(frozen=True, slots=True)
class GgufType:
    """A way to store values that is judged here: so many values of a row are a block of so many bytes."""

    name: str
    block: int
    nbytes: int


# By ggml's number. Other types have a number only. Source: ggml.h, enum ggml_type.
TYPES: Mapping[int, GgufType] = MappingProxyType(
    {0: GgufType("F32", 1, 4), 1: GgufType("F16", 1, 2), 8: GgufType("Q8_0", 32, 34), 30: GgufType("BF16", 1, 2)}
)
BY_NAME: Mapping[str, GgufType] = MappingProxyType({row.name: row for row in TYPES.values()})
FINEST_FIRST = ("F32", "F16", "BF16", "Q8_0")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` has the rows first; `start` counts bytes from the file's; `nbytes` is -1 for a type that is not judged here."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file. `tensors` are in the header's order."""

    name: str
    nbytes: int
    alignment: int
    data_start: int
    metadata: Mapping[str, GgufValue]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path, name: str) -> GgufFile:
    """Return what a file's header says, without judging its offsets.

    Args:
        path: the file.
        name: how the result should call it.

    Returns:
        Metadata and tensors.

    Raises:
        ValueError: no GGUF of a known version, or the header is cut, repeats a key, or is impossible.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as stream:
        source = _Source(stream, nbytes)
        if source.take(4) != MAGIC:
            raise ValueError("does not begin with GGUF")
        version = source.number("<I")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version}, known are {', '.join(map(str, VERSIONS))}")
        num_tensors, num_values = source.number("<Q"), source.number("<Q")
        metadata: dict[str, GgufValue] = {}
        for _ in range(num_values):
            key = source.text()
            if key in metadata:
                raise ValueError(f"{key} stands in it twice")
            metadata[key] = source.value(source.number("<I"), 0)
        rows = [_read_tensor(source) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-source.at // alignment) * alignment
    tensors = tuple(GgufTensor(key, shape, kind, data_start + offset, size) for key, shape, kind, offset, size in rows)
    return GgufFile(name, nbytes, alignment, data_start, metadata, tensors)


def main_type(file: GgufFile) -> str:
    """Return the type that most bytes of a file's matrices have.

    Args:
        file: any file.

    Returns:
        The type; "" without a matrix, or with one of a type that is not judged here.
    """
    nbytes: Counter[str] = Counter()
    for tensor in file.tensors:
        if tensor.nbytes < 0:
            return ""
        if len(tensor.shape) > 1:
            nbytes[tensor.type] += tensor.nbytes
    return max(sorted(nbytes), key=lambda kind: nbytes[kind], default="")


def coarsest_type(file: GgufFile) -> str:
    """Return the type of a file's matrices that rounds most: what its logits can be held to.

    Args:
        file: any file.

    Returns:
        The type; "" without a matrix, or with one of a type that is not judged here.
    """
    kinds = {tensor.type for tensor in file.tensors if len(tensor.shape) > 1}
    return max(kinds, key=FINEST_FIRST.index) if kinds and kinds <= set(FINEST_FIRST) else ""


class _Source:
    # Takes bytes from the front; `at` counts them.
    def __init__(self, stream: BinaryIO, nbytes: int) -> None:
        self._stream, self._nbytes, self.at = stream, nbytes, 0

    def take(self, count: int) -> bytes:
        if count > self._nbytes - self.at:
            raise ValueError(f"ends inside its header: {count} bytes wanted at {self.at} of {self._nbytes}")
        self.at += count
        return self._stream.read(count)

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def text(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int) -> GgufValue:
        if kind in _SCALARS:
            form, make = _SCALARS[kind]
            (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
            return make(value)
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise ValueError(f"a value of kind {kind}")
        item, count = self.number("<I"), self.number("<Q")
        if count > self._nbytes - self.at:  # every item takes a byte at least
            raise ValueError(f"an array of {count} values in a file of {self._nbytes} bytes")
        if item in _SCALARS:
            form, make = _SCALARS[item]
            raw = self.take(count * struct.calcsize(form))
            return tuple(make(value) for (value,) in struct.iter_unpack(form, raw))
        return tuple(self.value(item, depth + 1) for _ in range(count))


_SCALARS: Mapping[int, tuple[str, Callable[[int | float], GgufValue]]] = {
    **{kind: (form, int) for kind, form in {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}.items()},
    **{kind: (form, float) for kind, form in {6: "<f", 12: "<d"}.items()},
    7: ("<?", bool),
}
_TEXT, _ARRAY = 8, 9


def _read_tensor(source: _Source) -> tuple[str, tuple[int, ...], str, int, int]:
    name, num_dims = source.text(), source.number("<I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"{name}: {num_dims} dims")
    shape = tuple(source.number("<Q") for _ in range(num_dims))[::-1]
    number, offset = source.number("<I"), source.number("<Q")
    if prod(shape) > MAX_NUMEL or offset > MAX_NUMEL:
        raise ValueError(f"{name}: shape {shape} at {offset} is larger than any file")
    kind = TYPES.get(number)
    if kind is None:
        return name, shape, f"ggml type {number}", offset, -1
    if (shape[-1] if shape else 1) % kind.block:
        raise ValueError(f"{name}: rows of {shape[-1]} values are no whole blocks of {kind.name}")
    return name, shape, kind.name, offset, prod(shape) // kind.block * kind.nbytes
