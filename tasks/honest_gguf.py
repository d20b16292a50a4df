"""The merged values as the gguf package itself quantizes them, dequantized again: what a sound GGUF file costs.

Written as safetensors under the published names, so that transformers runs them without reading GGUF; shares nothing with the engine.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from validators.gguf_names import published_name
from validators.release import open_release


def write_honest_gguf(merged: Path, release: Path, folder: Path) -> Path:
    """Write the merged values, each tensor through the type the release stores it in.

    Args:
        merged: the values before any cast; one of its files at a time is held in memory, in fp32.
        release: a folder with one GGUF file; names the types, its values are not read.
        folder: where to; made.

    Returns:
        `folder`, with the merged folder's other files beside the weights.
    """
    folder.mkdir(parents=True)
    (file,) = open_release(release).ggufs
    types = {published_name(tensor.name): tensor.type for tensor in file.tensors}
    source = open_release(merged)
    for part in source.files:
        with safe_open(merged / part.name, "pt") as values:
            held = {name: _through(values.get_tensor(name), types[name]) for name in values.keys() if name in types}  # noqa: SIM118
        save_file(held, folder / part.name, metadata={"format": "pt"})
    for name in source.others:
        shutil.copyfile(merged / name, folder / name)
    return folder


def quantize_by_package(values: torch.Tensor, kind: str) -> npt.NDArray[Any]:
    """Return values as the gguf package stores them.

    Args:
        values: of any float dtype, the last axis a whole number of the type's blocks.
        kind: GGUF's name of the type.

    Returns:
        Values of the type, or its blocks as bytes; rows as in `values`.
    """
    import gguf

    wide = values.to(torch.float32).contiguous().numpy()
    with np.errstate(all="ignore"):  # scales of blocks that are nearly zero have no finite inverse
        return gguf.quants.quantize(wide, gguf.GGMLQuantizationType[kind])


def _through(values: torch.Tensor, kind: str) -> torch.Tensor:
    import gguf

    stored = quantize_by_package(values, kind)
    widened = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(widened.astype(np.float32).reshape(tuple(values.shape)))
