"""Released tensors by the part they play: the same weight of every layer is one *role*, and its layers are a series.

The role of `model.layers.3.mlp.experts.7.up_proj.weight` is `model.layers.*.mlp.experts.*.up_proj.weight`, its layer 3; the
experts of one layer share a point. A name without a number is a role of its own, with one tensor.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Literal

from reports.model import TensorStatistics

Statistic = Literal["absmax", "rms"]


@dataclass(frozen=True, slots=True)
class Point:
    """One layer of a role: least, middle and greatest of the finite positive values. `zeros` and `nonfinite` count tensors.

    `low`, `mid` and `high` are NaN when the layer has no finite positive value.
    """

    layer: int
    low: float
    mid: float
    high: float
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Role:
    """One role: its points by layer, ascending, for both statistics. `tensors` counts what they stand for."""

    name: str
    tensors: int
    absmax: tuple[Point, ...]
    rms: tuple[Point, ...]

    @property
    def is_series(self) -> bool:
        """Whether there is more than one layer to compare."""
        return len(self.rms) > 1

    @property
    def nonfinite(self) -> int:
        """How many tensors hold a NaN or an infinity."""
        return sum(point.nonfinite for point in self.rms)


def group_roles(tensors: Iterable[TensorStatistics]) -> list[Role]:
    """Return the roles in the order their first tensors come.

    Args:
        tensors: statistics in the release's order.

    Returns:
        One role per distinct name with its numbers starred.
    """
    grouped: dict[str, dict[int, list[TensorStatistics]]] = defaultdict(lambda: defaultdict(list))
    for tensor in tensors:
        role, layer = split_layer(tensor.name)
        grouped[role][layer].append(tensor)
    return [
        Role(
            name,
            sum(map(len, layers.values())),
            tuple(_point(layer, layers[layer], "absmax") for layer in sorted(layers)),
            tuple(_point(layer, layers[layer], "rms") for layer in sorted(layers)),
        )
        for name, layers in grouped.items()
    ]


def split_layer(name: str) -> tuple[str, int]:
    """Return the role of a tensor and its layer.

    Args:
        name: a tensor's name, dots between its parts.

    Returns:
        The name with each number starred, and the first number (0 when there is none).
    """
    parts = name.split(".")
    numbers = [int(part) for part in parts if _is_number(part)]
    return ".".join("*" if _is_number(part) else part for part in parts), numbers[0] if numbers else 0


def common_prefix(names: Sequence[str]) -> str:
    """Return what all names start with, in whole parts.

    Args:
        names: roles or tensors.

    Returns:
        `model.layers.*.`, dot included; empty when they share nothing, or there is one name only.
    """
    parts = [name.split(".")[:-1] for name in names] if len(names) > 1 else []
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))]
    return "".join(f"{part}." for part in shared)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 10


def _point(layer: int, tensors: Sequence[TensorStatistics], statistic: Statistic) -> Point:
    values = [getattr(tensor, statistic) for tensor in tensors]
    plotted = [v for v in values if math.isfinite(v) and v > 0]
    low, mid, high = (min(plotted), median(plotted), max(plotted)) if plotted else (math.nan, math.nan, math.nan)
    broken = sum(1 for t, v in zip(tensors, values, strict=True) if t.nonfinite or not math.isfinite(v))
    return Point(layer, low, mid, high, sum(1 for v in values if v == 0), broken)
