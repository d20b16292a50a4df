"""The header of a safetensors file as byte ranges, held to the format's rules: no hole, no overlap, sizes that fit.

Layout: 8 bytes little-endian length N, N bytes of JSON, then the values; offsets in the JSON count from the values' first byte.

Source: safetensors 0.8, README, format section; safetensors/src/tensor.rs (`Metadata::validate`).
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TypeGuard

from reports.errors import FormatError
from tasks.engine.containers.ranges import read_range, unreadable
from validators.expectation import ITEMSIZE

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones
REMEDY = "Restore the file from another copy or export another step."
_PREFIX = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredValues:
    """One tensor of a file: its values are [start, start + nbytes) of the file, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file's header: tensors by name in the order of their bytes, the free text of `__metadata__`, and the header's own bytes."""

    path: str
    tensors: Mapping[str, StoredValues]
    metadata: Mapping[str, str]
    header: bytes


def read_safetensors(path: str) -> SafetensorsFile:
    """Return the header of a safetensors file.

    Args:
        path: the file.

    Returns:
        Its tensors; no value is read.

    Raises:
        FormatError: cut short, unreadable, not JSON, a dtype without a known size, a hole, an overlap, or sizes that do not fit.
    """
    try:
        file_nbytes = os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if file_nbytes < _PREFIX.size:
        raise _refuse(path, f"{file_nbytes} bytes are too short for a safetensors header")
    (length,) = _PREFIX.unpack(read_range(path, 0, _PREFIX.size))
    if length > MAX_HEADER_BYTES or _PREFIX.size + length > file_nbytes:
        raise _refuse(path, f"header of {length} bytes in a file of {file_nbytes}: cut short, or not safetensors")
    header = read_range(path, _PREFIX.size, length)
    entries = _parse(path, header)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refuse(path, "__metadata__ is not an object of texts")
    values_at = _PREFIX.size + length
    tensors = sorted((_stored(path, name, entry, values_at) for name, entry in entries.items()), key=lambda t: (t.start, t.nbytes))
    at = values_at
    for tensor in tensors:
        if tensor.start != at:
            raise _refuse(path, f"{tensor.name}: {'hole' if tensor.start > at else 'overlap'} before byte {tensor.start}, expected {at}")
        at += tensor.nbytes
    if at != file_nbytes:
        raise _refuse(path, f"tensors end at byte {at}, the file at {file_nbytes}: {'cut short' if at > file_nbytes else 'bytes too many'}")
    return SafetensorsFile(path, MappingProxyType({t.name: t for t in tensors}), MappingProxyType(metadata), header)


def _parse(path: str, header: bytes) -> dict[str, object]:
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _refuse(path, f"header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _refuse(path, "header is not a JSON object")
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
    return made


def _stored(path: str, name: str, entry: object, values_at: int) -> StoredValues:
    if not isinstance(entry, dict):
        raise _refuse(path, f"{name}: entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and _is_counts(shape) and _is_counts(offsets) and len(offsets) == 2):
        raise _refuse(path, f"{name}: entry without a valid dtype, shape and data_offsets")
    if dtype not in ITEMSIZE:
        raise _refuse(path, f"{name}: dtype {dtype} is not known; known are {', '.join(ITEMSIZE)}")
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise _refuse(path, f"{name}: {dtype} of shape {tuple(shape)} takes {nbytes} bytes, its offsets are {offsets}")
    return StoredValues(name, dtype, tuple(shape), values_at + offsets[0], nbytes)


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _refuse(path: str, what: str) -> FormatError:
    return FormatError(what, where=path, remedy=REMEDY)
