"""Hugging Face folders as transformers and torch leave them: safetensors by the safetensors library, `.bin` by torch.save."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = Mapping[str, torch.Tensor]

WEIGHTS: Tensors = {
    "model.embed_tokens.weight": torch.arange(24, dtype=torch.bfloat16).reshape(6, 4),
    "model.layers.0.mlp.up_proj.weight": torch.randn(5, 4, generator=torch.Generator().manual_seed(1)),
    "model.norm.weight": torch.ones(4, dtype=torch.float16),
    "model.steps": torch.tensor(17),
}


def write_shards(folder: Path, tensors: Tensors = WEIGHTS, *, suffix: str = ".safetensors", shards: int = 2) -> dict[str, str]:
    """Write `tensors` round robin into shards with an index; returns the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    weight_map = {}
    for shard in range(shards):
        part = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % shards == shard}
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}{suffix}"
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map, suffix=suffix)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, str], *, suffix: str = ".safetensors") -> None:
    """Write the index of a folder."""
    name = "model.safetensors.index.json" if suffix == ".safetensors" else "pytorch_model.bin.index.json"
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def write_file(path: Path, tensors: Tensors) -> None:
    """Write one weight file by the library its suffix asks for."""
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path, metadata={"format": "pt"})
    else:
        torch.save(dict(tensors), path)
