"""Matrices, or experts fused into one, with zeros where the others of their role have none: a part of them was never filled.

A part of the `outliers` check. It is beyond doubt, since training leaves no exact zeros: a shard that was not merged is a block of them.
Where half of a role has zeros the model was pruned, and nothing is said; where more than a few have, these layers may have been pruned,
and it is only said. A matrix of zeros throughout is the finite check's.

A fused expert is known by its sample alone, so that only one of which a quarter or more is zero is seen.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding
from validators.measured import Measured, by_role
from validators.policy import FEW_ZEROS, LARGEST_LOST_SHARE, LOST_EXPERT_ZEROS, LOST_ZEROS, UNQUANTIZED
from validators.sampled import count_slices, sample_values
from validators.tables import parse_shape

_FEWEST = 3  # of a role: one with zeros, two without


@dataclass(frozen=True, slots=True)
class _Fused:
    """A tensor of fused experts; `shares` are those of zeros among each expert's sampled values."""

    row: Measured
    shares: Sequence[float]


def judge_zeros(rows: Sequence[Measured], samples: Mapping[str, bytes], proven: Collection[str]) -> Iterator[Finding]:
    """Judge the zeros of every matrix by those of its role.

    Args:
        rows: of unquantized tensors.
        samples: raw bytes by tensor name.
        proven: names of tensors that equal the source's.

    Yields:
        A finding for each matrix that lost a part, and for each fused tensor that lost experts.
    """
    for group in by_role(row for row in rows if _is_matrix(row)).values():
        lost = dict(_judge_shares(group))
        fused = [_fused(row, samples[row.name]) for row in group if _is_fused(row) and row not in lost]
        for row, found in (*lost.items(), *_judge_experts(fused)):
            yield finding(
                _code(row, len(lost), len(group), proven), row.name, expected="hardly a zero, as in the others of its role", found=found
            )


def _code(row: Measured, lost: int, count: int, proven: Collection[str]) -> str:
    if row.name in proven:
        return "outliers.source-zeros"
    return "outliers.zeros" if lost <= max(1, LARGEST_LOST_SHARE * count) else "outliers.zeros-of-some"


def _is_matrix(row: Measured) -> bool:
    is_bias = row.name.endswith("bias")  # those of fused experts have two dims; zeros are normal in them
    return row.dtype in UNQUANTIZED and len(parse_shape(row.shape)) > 1 and row.numel > 0 and not row.is_zero and not is_bias


def _judge_shares(group: Sequence[Measured]) -> Iterator[tuple[Measured, str]]:
    middle = median(row.zero_share for row in group)
    if len(group) >= _FEWEST and middle <= FEW_ZEROS:
        for row in group:
            if row.zero_share > middle + LOST_ZEROS:
                yield row, f"{row.zero_share:.1%} of the values are zero; median of {len(group)}: {middle:.1%}"


def _is_fused(row: Measured) -> bool:
    return count_slices(row.name, parse_shape(row.shape)) > 1


def _fused(row: Measured, sample: bytes) -> _Fused:
    values = sample_values(sample, row.dtype)
    experts = values.reshape(parse_shape(row.shape)[0], -1) if len(values) else np.empty((0, 0))
    return _Fused(row, (experts == 0).mean(1).tolist() if experts.size else [])


def _judge_experts(group: Sequence[_Fused]) -> Iterator[tuple[Measured, str]]:
    every = [share for fused in group for share in fused.shares]
    if len(every) < _FEWEST or median(every) > 0:
        return
    for fused in group:
        lost = [str(expert) for expert, share in enumerate(fused.shares) if share >= LOST_EXPERT_ZEROS]
        if lost:
            yield fused.row, f"experts {name_some(lost)} are zero for a quarter or more; most of {len(every)} have no zero"
