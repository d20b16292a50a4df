"""Puts tensors together from what a reader says, with plain file reads and torch: no product code between payload and values."""

import zlib
from pathlib import Path

import torch

from tasks.engine.formats.reader import CheckpointReader
from tasks.engine.tensors.catalog import Fragment
from tasks.witnesses.sources import Stored

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def read_values(reader: CheckpointReader, fragment: Fragment) -> torch.Tensor:
    """Return a fragment's values; its recorded checksum must fit."""
    payload = reader.payload(fragment)
    with Path(payload.path).open("rb") as file:
        file.seek(payload.start)
        content = file.read(payload.nbytes)
    assert len(content) == payload.nbytes
    assert payload.crc32 in (None, zlib.crc32(content))
    dtype = TORCH_DTYPES[fragment.dtype]
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    if payload.strides is None:
        return flat.reshape(fragment.region.shape)
    return flat.as_strided(fragment.region.shape, payload.strides)


def assemble(reader: CheckpointReader, fqn: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a whole tensor, after proving that its fragments tile `shape`."""
    catalog = reader.catalog()
    catalog.check_coverage(fqn, shape)
    whole = torch.empty(shape, dtype=TORCH_DTYPES[catalog.tensor(fqn).dtype])
    for fragment in catalog.fragments(fqn):
        region = fragment.region
        whole[tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))] = read_values(reader, fragment)
    return whole


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal dtype, shape and bytes; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


def gather(stored: Stored, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor from a witness's boxes, which must hold as many elements as `value` and may not repeat any."""
    whole, filled = torch.empty_like(value), 0
    for box in stored[name]:
        with box.open() as read:
            values = read((0,) * len(box.box.shape), box.box.shape)
        whole[tuple(slice(o, o + n) for o, n in zip(box.box.offset, box.box.shape, strict=True))] = values
        filled += values.numel()
    assert filled == value.numel()
    return whole
