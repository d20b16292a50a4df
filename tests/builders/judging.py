"""One check on hand-made tensors: written by safetensors, measured as the product measures, judged without any source."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.measure import measure
from validators.check import Outcome
from validators.expectation import Evidence
from validators.release import Release


def judge_tensors(
    examine: Callable[[Evidence], Outcome], folder: Path, tensors: Mapping[str, torch.Tensor], **config: object
) -> list[tuple[str, str]]:
    """Return the code and the place of every finding."""
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    measured = measure(folder, plan_path=None, source_roots=(), workers=1)
    outcome = examine(Evidence(Release(folder, (), config=config), tensors=measured.tensors))
    assert outcome.examined >= len(tensors)
    return [(found.code, found.where) for found in outcome.findings]


def layers(count: int, make: Callable[[int], torch.Tensor], *parts: str) -> dict[str, torch.Tensor]:
    """Return a tensor per layer and part, each made of its layer's number."""
    return {f"model.layers.{i}.{part}": make(i) for i in range(count) for part in parts}
