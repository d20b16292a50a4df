"""Running sums over a tensor's pieces: its statistics, and how far it is from what a witness says.

All sums are in fp64. Bits are compared on integer views, so NaN equals the same NaN and 0.0 differs from -0.0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})

Indices = npt.NDArray[np.int64]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True)
class Tally:
    """Statistics of the values added so far. `low`, `high`, `total` and `squares` are over finite values."""

    numel: int = 0
    nonfinite: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    _scratch: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

    def add(self, values: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Add one piece.

        Args:
            values: contiguous, any dtype but complex ones.

        Returns:
            The values in fp64, flat, good until the next piece is added; and the sum of the squares of the finite ones.
        """
        if self._scratch.numel() < values.numel():
            self._scratch = torch.empty(values.numel(), dtype=torch.float64)
        wide = self._scratch[: values.numel()].copy_(values.reshape(-1))
        self.numel += wide.numel()
        self.zeros += wide.numel() - count_nonzero(values)
        low, high = (float(edge) for edge in torch.aminmax(values if values.dtype in _NARROW else wide))  # narrow is half the time
        finite = wide
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = wide[torch.isfinite(wide)]
            self.nonfinite += wide.numel() - finite.numel()
            low, high = (float(edge) for edge in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.total += float(finite.sum())
        squares = float(torch.dot(finite, finite))
        self.squares += squares
        return wide, squares

    @property
    def finite(self) -> int:
        """How many finite values were added."""
        return self.numel - self.nonfinite

    @property
    def absmax(self) -> float:
        """Largest magnitude of a finite value; NaN when there is none."""
        return max(abs(self.low), abs(self.high)) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite values; NaN when there is none."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN when there is none."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def zero_share(self) -> float:
        """Share of exact zeros among all values; NaN when there is none."""
        return self.zeros / self.numel if self.numel else math.nan

    @property
    def is_constant(self) -> bool:
        """More than one value, and all equal."""
        return self.numel > 1 and self.nonfinite == 0 and self.low == self.high


@dataclass(slots=True)
class Difference:
    """How far the values found are from those expected.

    `first` is the smallest flat index that differs, -1 for none; `max_abs` is NaN when a NaN stands against a number. The error sums
    compare with the source before any cast.
    """

    numel: int = 0
    differing: int = 0
    first: int = -1
    max_abs: float = 0.0
    flushed: int = 0
    error_squares: float = 0.0
    source_squares: float = 0.0

    def add(self, found: torch.Tensor, source: torch.Tensor, wide: torch.Tensor, squares: float, index: Callable[[], Indices]) -> None:
        """Add one piece.

        Args:
            found: the piece as released, contiguous.
            source: the piece as the witness has it, in the source's dtype.
            wide: what `Tally.add` returned for `found`.
            squares: likewise.
            index: gives the flat index in the tensor of each element; asked only where values differ.
        """
        expected = source.to(found.dtype).contiguous()
        self.numel += found.numel()
        same = np.array_equal(_words(found), _words(expected))
        if source.dtype != found.dtype:
            self.flushed += count_nonzero(source.contiguous()) - count_nonzero(expected)
        if same and source.dtype == found.dtype:
            self.source_squares += squares
            return
        origin = source.to(torch.float64).reshape(-1)
        gap = wide - origin
        self.error_squares += float(torch.dot(gap, gap))
        self.source_squares += float(torch.dot(origin, origin))
        if not same:
            self._count(found, expected, index())

    def _count(self, found: torch.Tensor, expected: torch.Tensor, index: Indices) -> None:
        unequal = np.flatnonzero(_words(found, whole=False) != _words(expected, whole=False))
        self.differing += len(unequal)
        first = int(index[unequal].min())
        self.first = first if self.first < 0 else min(self.first, first)
        at = torch.from_numpy(unequal)
        gaps = (found.reshape(-1)[at].to(torch.float64) - expected.reshape(-1)[at].to(torch.float64)).abs()
        largest = float(gaps.max())  # NaN wins in torch's max, as it must in ours
        self.max_abs = largest if math.isnan(largest) else math.nan if math.isnan(self.max_abs) else max(self.max_abs, largest)

    @property
    def relative_error(self) -> float:
        """Rms of (found - source) over rms of the source; infinite when only the source is all zero."""
        if self.source_squares == 0:
            return 0.0 if self.error_squares == 0 else math.inf
        return math.sqrt(self.error_squares / self.source_squares)


def count_nonzero(values: torch.Tensor) -> int:
    """Count values that are not zero; -0.0 is zero, NaN is not.

    Args:
        values: contiguous, any dtype but complex ones.

    Returns:
        The count.
    """
    words = _words(values, whole=False)
    return int(np.count_nonzero(np.left_shift(words, 1) if values.is_floating_point() else words))  # the shift drops the sign


def _words(values: torch.Tensor, *, whole: bool = True) -> npt.NDArray[np.unsignedinteger]:
    # The bytes of contiguous values as unsigned words: one per element, or (to compare quickly) as wide as fits.
    raw = values.reshape(-1).view(torch.uint8).numpy()
    return raw.view(np.uint64 if whole and raw.nbytes % 8 == 0 else _UNSIGNED[values.element_size()])
