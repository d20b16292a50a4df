"""Hands for planting faults: edit a release folder's tensors, headers and JSON, keeping everything else as it was."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Apply `change` to all tensors; names stay in their file, new names go to the last one; the index follows."""
    paths = sorted(folder.glob("*.safetensors"))
    files = {path: load_file(path) for path in paths}
    tensors = {name: tensor for held in files.values() for name, tensor in held.items()}
    home = {name: path for path, held in files.items() for name in held}
    change(tensors)
    for path in paths:
        kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items() if home.get(name, paths[-1]) == path}
        save_file(kept, path, metadata={"format": "pt"})
    if (folder / INDEX).is_file():
        listed = {name: home.get(name, paths[-1]).name for name in sorted(tensors)}
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": listed})


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    """Apply `change` to a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


def set_fields(path: Path, **fields: object) -> None:
    """Set fields of a JSON file; None removes one."""

    def change(value: dict) -> None:
        for key, field in fields.items():
            value.pop(key, None) if field is None else value.update({key: field})

    edit_json(path, change)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=1))


def edit_header(path: Path, change: Callable[[dict], None]) -> None:
    """Apply `change` to a safetensors header; the data section stays as it is."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def first_file(folder: Path) -> Path:
    """Return the first weight file."""
    return min(folder.glob("*.safetensors"))
