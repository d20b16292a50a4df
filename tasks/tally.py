"""Running sums over a tensor's pieces: its statistics, and how far it is from what a witness says.

Sums are in fp64; those of narrow dtypes over runs of 1024 values in fp32 first, which is faster and keeps six digits. Bits are compared
on integer views, so NaN equals the same NaN and 0.0 differs from -0.0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
_RUN_NUMEL = 1024
_FP32_SQUARES = (1e-12, 1e15)  # largest magnitudes of a piece between which a run's squares neither vanish nor overflow in fp32

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.unsignedinteger]

_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}  # its bits, which no finite magnitude reaches

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Scratch:
    """Memory that is used again from piece to piece: fresh memory costs the kernel more than the arithmetic done in it. For one thread."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return memory, good until the same dtype is taken again.

        Args:
            dtype: of the elements.
            numel: how many.

        Returns:
            (numel,), of any values.
        """
        held = self._held.get(dtype)
        if held is None or held.numel() < numel:
            held = self._held[dtype] = torch.empty(numel, dtype=dtype)
        return held[:numel]


@dataclass(slots=True)
class Tally:
    """Statistics of the values added so far. `low`, `high`, `total` and `squares` are over finite values; `bits` is the XOR of all.

    `low` and `high` are bounds. The one of larger magnitude is exact, and they are equal only where all values are.
    """

    scratch: Scratch = field(default_factory=Scratch, repr=False)
    numel: int = 0
    nonfinite: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    bits: int = 0

    def add(self, values: torch.Tensor) -> float:
        """Add one piece.

        Args:
            values: contiguous, any dtype but complex ones.

        Returns:
            The sum of the squares of the finite values.
        """
        flat = values.reshape(-1)
        dtype = torch.float32 if flat.dtype in _NARROW else torch.float64
        wide = flat if flat.dtype == dtype else self.scratch.take(dtype, flat.numel()).copy_(flat)
        self.numel += flat.numel()
        self.bits ^= _exclusive_or(flat)
        magnitudes = _magnitudes(flat, self.scratch)
        self.zeros += _count_zeros(magnitudes)
        low, high = _bounds(magnitudes, flat.dtype) or _edges(wide)
        if not (math.isfinite(low) and math.isfinite(high)):
            wide = wide[torch.isfinite(wide)]
            self.nonfinite += flat.numel() - wide.numel()
            low, high = _edges(wide) if wide.numel() else (math.inf, -math.inf)
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not _FP32_SQUARES[0] <= max(-low, high) <= _FP32_SQUARES[1]:
            wide = wide.to(torch.float64)
        total, squares = _sums(wide)
        self.total += total
        self.squares += squares
        return squares

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
    def parity(self) -> str:
        """XOR of all values' bits, in hex: the same whatever pieces they came in, another as soon as one bit is."""
        return f"{self.bits:x}"

    @property
    def is_constant(self) -> bool:
        """More than one value, and all equal."""
        return self.numel > 1 and self.nonfinite == 0 and self.low == self.high

    def as_columns(self) -> dict[str, object]:
        """Return the statistics as a TensorTable has them.

        Returns:
            Column to value.
        """
        return {
            "absmax": self.absmax,
            "rms": self.rms,
            "mean": self.mean,
            "nonfinite": self.nonfinite,
            "zero_share": self.zero_share,
            "constant": int(self.is_constant),
            "parity": self.parity,
        }


@dataclass(slots=True)
class Difference:
    """How far the values found are from those expected.

    `first` is the smallest flat index that differs, -1 for none; `max_abs` is NaN when a NaN stands against a number. The error sums
    compare with the source before any cast.
    """

    scratch: Scratch = field(default_factory=Scratch, repr=False)
    numel: int = 0
    differing: int = 0
    first: int = -1
    max_abs: float = 0.0
    flushed: int = 0
    error_squares: float = 0.0
    source_squares: float = 0.0

    def add(self, found: torch.Tensor, source: torch.Tensor, squares: float, index: Callable[[], Indices]) -> None:
        """Add one piece.

        Args:
            found: the piece as released, contiguous.
            source: the piece as the witness has it, in the source's dtype.
            squares: what `Tally.add` returned for `found`.
            index: gives the flat index in the tensor of each element; asked only where values differ.
        """
        expected = source.to(found.dtype).contiguous()
        self.numel += found.numel()
        same = self._is_same(_words(found), _words(expected))
        if source.dtype != found.dtype:
            self.flushed += count_zeros(expected, self.scratch) - count_zeros(source.contiguous(), self.scratch)
        if same and source.dtype == found.dtype:
            self.source_squares += squares
            return
        origin = source.to(torch.float64).reshape(-1)
        gap = found.reshape(-1).to(torch.float64) - origin
        self.error_squares += float(torch.dot(gap, gap))
        self.source_squares += float(torch.dot(origin, origin))
        if not same:
            self._count(found, expected, index())

    def _is_same(self, found: Words, expected: Words) -> bool:
        equal = self.scratch.take(torch.bool, found.size).numpy()
        return bool(np.equal(found, expected, out=equal).all())

    def _count(self, found: torch.Tensor, expected: torch.Tensor, index: Indices) -> None:
        unequal = np.flatnonzero(_words(found, whole=False) != _words(expected, whole=False))
        self.differing += len(unequal)
        first = int(index[unequal].min())
        self.first = first if self.first < 0 else min(self.first, first)
        at = torch.from_numpy(unequal)
        gaps = (found.reshape(-1)[at].to(torch.float64) - expected.reshape(-1)[at].to(torch.float64)).abs()
        largest = float(gaps.max())  # NaN wins in torch's max, as it must in ours
        self.max_abs = largest if math.isnan(largest) else math.nan if math.isnan(self.max_abs) else max(self.max_abs, largest)

    def as_row(self, name: str, witness: str, *, expected_crc32: int = -1, found_crc32: int = -1) -> dict[str, object]:
        """Return the row of a ValueTable.

        Args:
            name: the released tensor.
            witness: whose values were expected.
            expected_crc32: of the whole tensor as the witness has it, -1 where it was not made.
            found_crc32: of the whole tensor as released, -1 where it was not made.

        Returns:
            Column to value.
        """
        return {
            "name": name,
            "witness": witness,
            "numel": self.numel,
            "differing": self.differing,
            "max_abs": self.max_abs,
            "first": self.first,
            "expected_crc32": expected_crc32,
            "found_crc32": found_crc32,
            "flushed": self.flushed,
        }

    @property
    def relative_error(self) -> float:
        """Rms of (found - source) over rms of the source; infinite when only the source is all zero."""
        if self.source_squares == 0:
            return 0.0 if self.error_squares == 0 else math.inf
        return math.sqrt(self.error_squares / self.source_squares)


def _sums(values: torch.Tensor) -> tuple[float, float]:
    # Sum and sum of squares of flat values.
    if values.dtype == torch.float64:
        return float(values.sum()), float(torch.dot(values, values))
    whole = values.numel() // _RUN_NUMEL * _RUN_NUMEL
    total = squares = 0.0
    for runs in (values[:whole].view(-1, _RUN_NUMEL), values[whole:].view(1, -1)):
        if runs.numel():
            total += float(runs.sum(1).numpy().sum(dtype=np.float64))
            squares += float(np.vecdot(runs.numpy(), runs.numpy()).sum(dtype=np.float64))
    return total, squares


def _edges(values: torch.Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(values)
    return float(low), float(high)


def _bounds(magnitudes: Words, dtype: torch.dtype) -> tuple[float, float] | None:
    # From the words of the magnitudes, which sort like them, in a third of the time that the values take; None where only those tell.
    infinity = _INFINITY.get(dtype)
    if infinity is None:
        return None
    largest = magnitudes.max()
    if largest >> 1 >= infinity or largest == magnitudes[0]:  # all equal, perhaps
        return None
    high = float(torch.from_numpy(np.atleast_1d(largest >> 1)).view(dtype))
    return -high, high


def _exclusive_or(values: torch.Tensor) -> int:
    # Of words as wide as fits, which are then folded to the width of an element.
    words = _words(values)
    bits, width = int(np.bitwise_xor.reduce(words)), 8 * words.itemsize
    while width > 8 * values.element_size():
        width //= 2
        bits = (bits >> width) ^ (bits & (1 << width) - 1)
    return bits


def count_zeros(values: torch.Tensor, scratch: Scratch) -> int:
    """Count values that are zero, 0.0 or -0.0.

    Args:
        values: contiguous, any dtype but complex ones.
        scratch: for the words without their signs.

    Returns:
        The count.
    """
    return _count_zeros(_magnitudes(values, scratch))


def _magnitudes(values: torch.Tensor, scratch: Scratch) -> Words:
    # One word per element: of floating point without the sign, shifted out on the left.
    words = _words(values, whole=False)
    if not values.is_floating_point():
        return words
    return np.left_shift(words, 1, out=scratch.take(_SIGNED[words.itemsize], words.size).numpy().view(words.dtype))


def _count_zeros(magnitudes: Words) -> int:
    if magnitudes.size and magnitudes.min():  # as nearly always, and found in a third of the time
        return 0
    return magnitudes.size - int(np.count_nonzero(magnitudes))


def _words(values: torch.Tensor, *, whole: bool = True) -> Words:
    # The bytes of contiguous values as unsigned words: one per element, or (to compare quickly) as wide as fits.
    raw = values.reshape(-1).view(torch.uint8).numpy()
    return raw.view(np.uint64 if whole and raw.nbytes % 8 == 0 else _UNSIGNED[values.element_size()])
