"""Casting between float dtypes, with what it loses counted.

Rounding is torch's: to nearest, ties to even. Overflow to infinity is refused; values flushed to zero are counted.
"""

import numpy as np
import torch

from reports.errors import EncodingError
from tasks.engine.tensors.ops import Raw

TORCH: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def to_tensor(rows: Raw, dtype: str) -> torch.Tensor:
    """Return raw values as a torch tensor that shares their memory.

    Args:
        rows: unsigned integers of the dtype's width, C order.
        dtype: a key of TORCH.

    Returns:
        The same shape, as floats.
    """
    return torch.from_numpy(rows.view(_SIGNED[rows.dtype.itemsize])).view(TORCH[dtype])


def to_raw(tensor: torch.Tensor) -> Raw:
    """Return a contiguous tensor's values as unsigned integers that share its memory.

    Args:
        tensor: any float dtype.

    Returns:
        The same shape.
    """
    width = tensor.element_size()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return tensor.view(signed).numpy().view(f"u{width}")


def encode_cast(name: str, rows: Raw, source: str, target: str) -> tuple[Raw, int]:
    """Return rows cast to another float dtype, and how many non-zero values became zero.

    Args:
        name: the tensor, for messages.
        rows: raw values of dtype `source`, C order.
        source: safetensors code of a float.
        target: safetensors code of a float.

    Returns:
        Raw values of dtype `target`; the count of flushed values.

    Raises:
        EncodingError: a finite value became infinite.
    """
    values = to_tensor(rows, source)
    cast = values.to(TORCH[target])
    if values.numel() == 0 or torch.finfo(TORCH[target]).max >= torch.finfo(TORCH[source]).max:
        return to_raw(cast), 0
    low, high = torch.aminmax(cast.float())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        overflowed = int((torch.isinf(cast) & torch.isfinite(values)).sum())
        if overflowed:
            biggest, end = float(values[torch.isfinite(values)].abs().max()), torch.finfo(TORCH[target]).max
            raise EncodingError(
                f"would be infinite in {target} at {overflowed:,} of {values.numel():,} places: the largest value is {biggest:.6g},"
                f" {target} ends at {end:.6g}",
                where=name,
                remedy="Export with --dtype bf16 or --dtype source; as GGUF with --gguf bf16.",
            )
    flushed = int(torch.count_nonzero(values)) - int(torch.count_nonzero(cast))
    return to_raw(cast), flushed
