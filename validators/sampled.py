"""Samples and repeated rows, as a TensorTable writes them and the checks read them. No check of its own.

A sample is hex: the bytes of at most SAMPLE_NUMEL values, at flat positions that are the same for every tensor of a shape; a tensor of
fused experts has one sample per expert, one behind the other.

Repeated rows are runs separated by blanks: `5:8=zero` (rows 5 to 7 are zero), `9:12=3` (each equals row 3), `16:32=0+` (row 16 equals
row 0, row 17 row 1, …).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pandas as pd

SAMPLE_NUMEL = 32  # two independent tensors of 16-bit values agree in a few of them, never in all
MAX_EXPERTS = 4096  # a matrix of more rows is no router
ZERO_ROW = -1  # the origin of a row of zeros

_RUN = re.compile(r"^(\d+):(\d+)=(zero|\d+)(\+?)$")
# How numpy reads the bytes of a float dtype; bf16 are the high halves of fp32.
_LAYOUTS: Mapping[str, str] = MappingProxyType({"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"})


@dataclass(frozen=True, slots=True)
class Run:
    """Rows start … stop-1: zero when `origin` is ZERO_ROW, else row start + i is bit-equal to row origin + i*step."""

    start: int
    stop: int
    origin: int
    step: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def format_runs(runs: Iterable[Run]) -> str:
    """Return runs as a table writes them.

    Args:
        runs: ascending.

    Returns:
        `5:8=zero 16:32=0+`; empty for none.
    """
    return " ".join(f"{r.start}:{r.stop}={'zero' if r.origin == ZERO_ROW else r.origin}{'+' if r.step else ''}" for r in runs)


def parse_runs(text: str) -> list[Run]:
    """Return the runs a table wrote.

    Args:
        text: what `format_runs` made.

    Returns:
        The runs, in their order.

    Raises:
        ValueError: not such a text.
    """
    runs = []
    for part in text.split():
        match = _RUN.match(part)
        if match is None:
            raise ValueError(f"{part}: not a run of rows of the form start:stop=row")
        start, stop, origin, step = match.groups()
        runs.append(Run(int(start), int(stop), ZERO_ROW if origin == "zero" else int(origin), len(step)))
    return runs


def count_slices(name: str, shape: tuple[int, ...]) -> int:
    """Return how many samples a tensor has.

    Args:
        name: the tensor's.
        shape: element counts per dim.

    Returns:
        The number of experts for fused ones, (E, A, C) under `….experts.gate_up_proj` and the like; else 1.
    """
    is_fused = len(shape) == 3 and "experts" in name.split(".")
    return shape[0] if is_fused and min(shape) > 0 else 1


def read_samples(table: pd.DataFrame) -> Mapping[str, bytes]:
    """Return the samples of a TensorTable.

    Args:
        table: a TensorTable.

    Returns:
        Raw bytes by tensor name; empty for a tensor that could not be read.
    """
    return {name: bytes.fromhex(text) for name, text in zip(table["name"].tolist(), table["sample"].tolist(), strict=True)}


def read_repeated(table: pd.DataFrame) -> Mapping[str, list[Run]]:
    """Return the repeated rows of a TensorTable.

    Args:
        table: a TensorTable.

    Returns:
        Runs by tensor name, only of tensors that have some.
    """
    pairs = zip(table["name"].tolist(), table["repeated"].tolist(), strict=True)
    return {name: parse_runs(text) for name, text in pairs if text}


def sample_values(sample: bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Return a sample's numbers.

    Args:
        sample: raw bytes.
        dtype: safetensors code.

    Returns:
        (n,) float64; none for a dtype that is not a float of 16 bits or more.
    """
    if dtype not in _LAYOUTS:
        return np.empty(0)
    raw = np.frombuffer(sample, _LAYOUTS[dtype])
    return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if dtype == "BF16" else raw.astype(np.float64)
