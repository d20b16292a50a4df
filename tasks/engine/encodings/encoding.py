"""A quantized encoding: what a weight becomes, known without data, and the arithmetic of one band of rows.

Rounding is to nearest, ties to even, symmetric around zero; one scale covers a block of rows x columns. All arithmetic is in the weight's
own dtype, each step rounded to it, so that values equal those of compressed-tensors 0.20.1 bit for bit (`calculate_qparams`, `quantize`,
`pack_to_int32`). It is not that library's code: its functions take four times as long for fp8 and fifty for packing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reports.errors import EncodingError
from validators.expectation import TensorSpec
from validators.layouts import Scheme, layout_rows

# Dtypes that a weight may have before it is quantized, the integers of their width, and the bits of infinity.
_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
QUANTIZABLE = frozenset({"BF16", "F16", "F32"})
_SHAPE_DTYPE = "I64"  # of the part that writes the shape down


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store a weight (N, K). `half_range` is half of what the stored values span; `store` takes quotients, (R, K), to what is
    written. Dims of a weight must be multiples of `multiples`.
    """

    name: str
    scheme: Scheme
    half_range: float
    store: Callable[[torch.Tensor], torch.Tensor]
    multiples: tuple[int, int] = (1, 1)

    @property
    def band_rows(self) -> int:
        """Rows that share scales."""
        return self.scheme.block[0] or 1

    def why_not(self, spec: TensorSpec) -> str:
        """Say why a weight cannot be stored so.

        Args:
            spec: the weight, not quantized.

        Returns:
            The reason; empty when it can.
        """
        if len(spec.shape) != 2:
            return f"{self.name} holds matrices, this has {len(spec.shape)} dims"
        if spec.dtype not in QUANTIZABLE:
            return f"{self.name} is made from {', '.join(sorted(QUANTIZABLE))}, this is {spec.dtype}"
        for what, size, multiple in zip(("rows", "columns"), spec.shape, self.multiples, strict=True):
            if size % multiple or not size:
                return f"{self.name} needs {what} in multiples of {multiple}, this has {size}"
        return ""

    def resolve(self, spec: TensorSpec) -> tuple[tuple[str, TensorSpec], ...]:
        """Return the parts of a weight, without data.

        Args:
            spec: the weight, not quantized; `why_not` says nothing of it.

        Returns:
            (suffix, part) each, the values first; scales have the weight's dtype.
        """
        module = spec.fqn.removesuffix(".weight")
        dtypes = {"main": self.scheme.stored_dtype, "scale": spec.dtype, "shape": _SHAPE_DTYPE}
        return tuple(
            (suffix, TensorSpec(f"{module}.{suffix}", row.shapes(self.scheme, spec.shape)[0], dtypes[row.part]))
            for suffix, row in layout_rows(self.scheme).items()
            if row.is_required(self.scheme)
        )


def encode_band(name: str, values: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a band of rows quantized.

    Args:
        name: the weight, for messages.
        values: (R, K), bf16, fp16 or fp32; R a multiple of the encoding's `band_rows`.
        encoding: how.

    Returns:
        What is stored of it, R rows; its scales, (R / rows of a block, K / columns of a block), of the dtype of `values`.

    Raises:
        EncodingError: a value is NaN or infinite.
    """
    rows, columns = values.shape
    height, width = encoding.band_rows, encoding.scheme.block[1] or columns
    blocks = values.reshape(rows, columns // width, width)
    largest = _largest(name, blocks)
    if height > 1:
        largest = largest.view(rows // height, height, -1).amax(1)
    scales = largest / encoding.half_range
    scales.masked_fill_(scales == 0, torch.finfo(scales.dtype).eps)
    over = scales.repeat_interleave(height, 0) if height > 1 else scales
    return encoding.store((blocks / over.unsqueeze(-1)).view(rows, columns)), scales


def round_integers(quotients: torch.Tensor, bits: int) -> torch.Tensor:
    """Return quotients rounded to integers of so many bits.

    Args:
        quotients: floats; overwritten.
        bits: at most 8.

    Returns:
        int8, the same shape, from -2^(bits-1) to 2^(bits-1) - 1.
    """
    half = 1 << (bits - 1)
    return quotients.clamp_(-half, half - 1).round_().to(torch.int8)


def _largest(name: str, blocks: torch.Tensor) -> torch.Tensor:
    # Absolute values ordered as integers: faster than floats, and what is not finite comes out on top.
    integers, infinity = _BITS[blocks.dtype]
    bits = (blocks.view(integers) & torch.iinfo(integers).max).amax(-1)
    if bits.numel() and int(bits.max()) >= infinity:
        raise EncodingError("holds values that are NaN or infinite", where=name, remedy="Export another step; this one has diverged.")
    return bits.view(blocks.dtype)
