"""Release folders made by safetensors itself, and where the recorded checkpoints are."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent.parent / "golden"
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


def write_release(folder: Path, tensors: Mapping[str, torch.Tensor], *, assets: Path | None = None) -> Path:
    """Write one weight file, with the files of `assets` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    for file in sorted(assets.iterdir()) if assets else []:
        shutil.copyfile(file, folder / file.name)
    return folder


def expected_tensors(case: Path, *, without_tied_head: bool = False) -> dict[str, torch.Tensor]:
    """Return the recorded full weights of a case."""
    tensors = load_file(case / "ref" / "expected.safetensors")
    if without_tied_head:
        tensors.pop("lm_head.weight", None)
    return tensors
