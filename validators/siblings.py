"""Matrices of one role (the same weight in other layers or experts) held against each other by their samples. No check of its own.

A *link* joins a matrix to an earlier one of its role that it equals, or nearly equals: its length is the relative distance of the two
samples, rms(a - b) over the rms of both, and 0 only when sample and statistics are equal.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from validators.expectation import ITEMSIZE
from validators.measured import Measured, role_of
from validators.policy import ALIKE_DISTANCE, NEAR_DISTANCE
from validators.sampled import count_slices, sample_values
from validators.tables import parse_shape

_SMALLEST_NUMEL = 64  # smaller matrices may be equal by chance
_DISTINCT_VALUES = 8  # a sample with fewer tells little: masks, tables of ones and zeros
_SMALLEST_DISTANCE = 1e-12  # of samples that are equal while the statistics are not
_SAME_STATISTICS = 1e-5  # of the rms: sums over other pieces differ by 1e-7


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of two dims or more, or one expert of a fused one.

    `name` is the tensor's; of a fused expert, what it would be called by itself (`….experts.3.down_proj`). `row` is the whole tensor's.
    `sample` is raw; `values` are its numbers, none for a dtype without.
    """

    name: str
    role: str
    row: Measured
    sample: bytes
    values: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Link:
    """From a matrix to an earlier one of its role."""

    name: str
    other: str
    distance: float


def telling_matrices(rows: Iterable[Measured], samples: Mapping[str, bytes]) -> list[Matrix]:
    """Return the matrices whose samples can show a copy.

    Args:
        rows: of a TensorTable.
        samples: raw samples by name.

    Returns:
        Those inside layers, large and varied enough, in the order given.
    """
    return [
        Matrix(name, role_of(name), row, sample, sample_values(sample, row.dtype))
        for row in rows
        if len(parse_shape(row.shape)) > 1 and row.numel >= _SMALLEST_NUMEL
        for name, sample in _slices(row, samples[row.name])
        if role_of(name) != name and _is_varied(sample, row.dtype)
    ]


def link_copies(matrices: Sequence[Matrix]) -> list[Link]:
    """Return which matrices equal or nearly equal an earlier one.

    Args:
        matrices: in the release's order.

    Returns:
        Links of length 0 to the first and to the last matrix before that is equal; else one to the nearest sibling before, if it is nearer
        than NEAR_DISTANCE. Siblings differ in one index.
    """
    equal = list(_link_equal(matrices))
    linked = {link.name for link in equal}
    return equal + [link for link in _link_near(matrices) if link.name not in linked]


def is_alike(group: Sequence[Matrix]) -> bool:
    """Return whether all matrices of a role hold about the same values: shared by design, not a copy among others.

    Args:
        group: every matrix of one role.

    Returns:
        False for one matrix alone.
    """
    first = group[0]
    if len(group) < 2 or any(other.row.shape != first.row.shape for other in group):
        return False
    if all(other.sample == first.sample for other in group):
        return True
    if any(not len(other.values) for other in group):
        return False
    return max(float(_distances([first, other])[0, 1]) for other in group[1:]) < ALIKE_DISTANCE


def _slices(row: Measured, sample: bytes) -> Iterator[tuple[str, bytes]]:
    count = count_slices(row.name, parse_shape(row.shape))
    nbytes = len(sample) // count
    if count == 1:
        yield row.name, sample
        return
    before, after = row.name.rsplit("experts.", 1)
    for expert in range(count):
        yield f"{before}experts.{expert}.{after}", sample[expert * nbytes : (expert + 1) * nbytes]


def _is_varied(sample: bytes, dtype: str) -> bool:
    size = ITEMSIZE.get(dtype, 1)
    return len({sample[at : at + size] for at in range(0, len(sample), size)}) >= _DISTINCT_VALUES


def _link_equal(matrices: Sequence[Matrix]) -> Iterator[Link]:
    alike: dict[tuple[str, str, str, bytes], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        held = alike[matrix.role, matrix.row.dtype, matrix.row.shape, matrix.sample]
        equal = [other for other in (held[0], held[-1]) if _same_statistics(other.row, matrix.row)] if held else []
        yield from (Link(matrix.name, name, 0.0) for name in dict.fromkeys(other.name for other in equal))
        held.append(matrix)


def _same_statistics(one: Measured, other: Measured) -> bool:
    return max(abs(one.rms - other.rms), abs(one.mean - other.mean)) <= _SAME_STATISTICS * one.rms


def _link_near(matrices: Sequence[Matrix]) -> Iterator[Link]:
    best: dict[str, Link] = {}
    for group in _sibling_groups(matrices):
        distances = _distances(group)
        distances[np.triu_indices(len(group))] = np.inf  # to itself and to those that come later
        for at in np.flatnonzero(distances.min(1) < NEAR_DISTANCE):
            nearest = int(distances[at].argmin())
            found = Link(group[at].name, group[nearest].name, max(float(distances[at, nearest]), _SMALLEST_DISTANCE))
            best[found.name] = min(found, best.get(found.name, found), key=lambda link: link.distance)
    return iter(best.values())


def _sibling_groups(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    # Matrices of one shape whose names differ in one index, and that have numbers.
    groups: dict[tuple[object, ...], list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        parts = matrix.name.split(".")
        for at in index_places(matrix.name) if len(matrix.values) else ():
            groups[at, matrix.row.shape, *parts[:at], *parts[at + 1 :]].append(matrix)
    return (group for group in groups.values() if len(group) > 1)


def index_places(name: str) -> list[int]:
    """Return which dotted parts of a name are indices.

    Args:
        name: a tensor's.

    Returns:
        Their places, the first part being 0; as `role_of` stars them.
    """
    starred = role_of(name).split(".")
    return [at for at, (part, star) in enumerate(zip(name.split("."), starred, strict=True)) if part != star]


def _distances(group: Sequence[Matrix]) -> npt.NDArray[np.float64]:
    # (n, n); infinite where NaN or infinity is among the values.
    values = np.stack([matrix.values for matrix in group])
    with np.errstate(all="ignore"):
        squares = (values**2).sum(1)
        power = (squares[:, None] + squares) / 2
        ratios = (2 * power - 2 * values @ values.T) / power
    distances: npt.NDArray[np.float64] = np.sqrt(np.nan_to_num(ratios, nan=np.inf).clip(min=0))
    return distances
