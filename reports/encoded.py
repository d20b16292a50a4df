"""Quantized weights of a report, summed by encoding and sorted by error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reports.model import EncodedWeight


@dataclass(frozen=True, slots=True)
class EncodingSize:
    """Weights of one encoding: what they take, what they took, and the largest error among them."""

    name: str
    weights: int
    nbytes: int
    source_nbytes: int
    worst: float


def sum_encodings(weights: Sequence[EncodedWeight]) -> list[EncodingSize]:
    """Return what the weights of each encoding take.

    Args:
        weights: all quantized ones.

    Returns:
        Sorted by name; the worst error is NaN where none of an encoding was compared.
    """
    by_name: dict[str, list[EncodedWeight]] = {}
    for weight in weights:
        by_name.setdefault(weight.encoding, []).append(weight)
    return [
        EncodingSize(
            name,
            len(held),
            sum(weight.nbytes for weight in held),
            sum(weight.source_nbytes for weight in held),
            worst_first(held)[0].relative_error,
        )
        for name, held in sorted(by_name.items())
    ]


def worst_first(weights: Sequence[EncodedWeight]) -> list[EncodedWeight]:
    """Return weights by their error.

    Args:
        weights: quantized ones.

    Returns:
        The largest error first; those that were not compared last.
    """
    return sorted(weights, key=lambda weight: math.inf if math.isnan(weight.relative_error) else -weight.relative_error)
