"""Releases that exist only as headers, for checks that read no byte."""

from pathlib import Path

from validators.release import Release, StoredTensor, WeightFile


def planned_release(shapes: dict, *, dtype: str = "F32", file: str = "model.safetensors", **fields) -> Release:
    """Return a release of one file that holds `shapes` back to back; more fields of Release by keyword."""
    stored, start = [], 0
    for name, shape in shapes.items():
        nbytes = {"F32": 4, "BF16": 2}[dtype]
        for length in shape:
            nbytes *= length
        stored.append(StoredTensor(name, file, dtype, tuple(shape), start, start + nbytes))
        start += nbytes
    return Release(None, (WeightFile(file, 8 + start, 8, tuple(stored), {"format": "pt"}),), **fields)


def codes_of(outcome) -> list[str]:
    """Return the codes of an outcome's findings, sorted."""
    return sorted(found.code for found in outcome.findings)


def write_bytes(path: Path, header: bytes, values: bytes) -> None:
    """Write a safetensors file from a header as it shall stand, and values."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)
