"""Rows of the tables as typed values, and what equal statistics mean. No check of its own."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import pandas as pd

from validators.tables import parse_shape

Signature = tuple[str, str, float, float, int, str, str]

# Mixtral, Qwen, DeepSeek; gpt-oss, Llama 4; Granite; Jetmoe and Hunyuan.
ROUTER_ENDINGS = (".gate.weight", ".router.weight", ".router.layer.weight", ".router.classifier.weight", ".gate.wg.weight")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of a TensorTable. `constant` is 1 when all elements (more than one) are equal, `parity` the XOR of their bits."""

    name: str
    file: str
    dtype: str
    shape: str
    absmax: float
    rms: float
    mean: float
    nonfinite: int
    zero_share: float
    constant: int
    parity: str
    sample: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(parse_shape(self.shape))

    @property
    def is_zero(self) -> bool:
        """Whether every element is zero."""
        return self.zero_share == 1.0

    @property
    def signature(self) -> Signature:
        """What two tensors share only when they hold the same values: exact statistics, and the sample.

        Neither rms nor mean are: the order of summation, which differs with the pieces a tensor is read in, moves them.
        """
        return (self.dtype, self.shape, self.absmax, self.zero_share, self.nonfinite, self.parity, self.sample)

    @property
    def is_telling(self) -> bool:
        """Whether an equal signature means equal values: not for constant tensors."""
        return not (self.constant or self.is_zero or self.numel < 2)


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of a ValueTable."""

    name: str
    witness: str
    numel: int
    differing: int
    max_abs: float
    first: int
    expected_crc32: int
    found_crc32: int
    flushed: int


def measured_rows(table: pd.DataFrame | None) -> list[Measured]:
    """Return the rows of a TensorTable.

    Args:
        table: a TensorTable, or None.

    Returns:
        Its rows in order; none for None.
    """
    if table is None:
        return []
    return [Measured(*row) for row in _columns(table, Measured)]


def compared_rows(table: pd.DataFrame | None) -> list[Compared]:
    """Return the rows of a ValueTable.

    Args:
        table: a ValueTable, or None.

    Returns:
        Its rows in order; none for None.
    """
    if table is None:
        return []
    return [Compared(*row) for row in _columns(table, Compared)]


def _columns(table: pd.DataFrame, row: type) -> Iterator[tuple[Any, ...]]:
    # Column by column is 20 times faster than row by row; tolist gives Python's own numbers.
    return zip(*(table[field.name].tolist() for field in fields(row)), strict=True)


def role_of(name: str) -> str:
    """Return a tensor's role: its name with every index (layer, expert) replaced by `*`.

    Args:
        name: a tensor name.

    Returns:
        `model.layers.*.mlp.up_proj.weight`.
    """
    return _INDEX.sub("*", name)


def is_norm(name: str) -> bool:
    """Return whether a name is that of a norm's tensor.

    Args:
        name: a tensor name.

    Returns:
        Whether it says so.
    """
    return "norm" in name.lower() or ".ln_" in name


def is_router(name: str) -> bool:
    """Return whether a name is that of a router's weight, as published models name it.

    Args:
        name: a tensor name.

    Returns:
        Whether it says so: `….mlp.gate.weight` is one, `….mlp.gate_proj.weight` none.
    """
    return name.endswith(ROUTER_ENDINGS)


def by_role(rows: Iterable[Measured]) -> Mapping[str, Sequence[Measured]]:
    """Return rows grouped by role.

    Args:
        rows: any rows.

    Returns:
        Rows by role, in the order given.
    """
    groups: dict[str, list[Measured]] = defaultdict(list)
    for row in rows:
        groups[role_of(row.name)].append(row)
    return groups
