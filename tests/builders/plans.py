"""Tiny export plans, written by hand as the JSON the plan's schema describes. Nothing of the product's planner is used."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Take:
    """A box of one source tensor; the whole tensor when offset and shape are left out."""

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Made:
    """One released tensor: its source boxes, one below the other."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    takes: tuple[Take, ...]
    op: str = "same"
    head_dim: int = 0


def whole(name: str, shape: tuple[int, ...], dtype: str, *, source: str = "", op: str = "same", head_dim: int = 0) -> Made:
    """A target made of one whole source tensor, of the same name unless `source` says otherwise."""
    return Made(name, shape, dtype, (Take(source or name, shape),), op, head_dim)


def write_plan(path: Path, source_format: str, root: Path, targets: list[Made]) -> Path:
    """Write the plan of one output file, without spans and digests (no witness reads them)."""
    tensors = [
        {
            "name": target.name,
            "shape": list(target.shape),
            "dtype": target.dtype,
            "inputs": [
                {
                    "name": take.name,
                    "offset": list(take.offset or (0,) * len(take.full_shape)),
                    "shape": list(take.shape or take.full_shape),
                    "dtype": "F32",
                    "full_shape": list(take.full_shape),
                }
                for take in target.takes
            ],
            "op": {"name": target.op, "head_dim": target.head_dim},
            "encoding": "copy",
            "span": [0, 0],
        }
        for target in targets
    ]
    source = {"format": source_format, "root": str(root), "step": None, "digest": ""}
    files = [{"name": "model.safetensors", "header_nbytes": 0, "nbytes": 0, "tensors": tensors}]
    plan = {"schema": "shardwright.plan/1", "source": source, "family": "", "naming": "", "dims": {}, "files": files}
    path.write_text(json.dumps(plan))
    return path
