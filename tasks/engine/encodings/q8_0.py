"""ggml's Q8_0: of every 32 values of a row, their fp16 scale and 32 signed bytes, 34 bytes a block.

Rounding is to nearest, halves away from zero; the scale is the largest magnitude over 127, rounded to fp16 only where it is stored. Bytes
equal those of gguf 0.19.0 (`quants.Q8_0`, itself equal to ggml-quants.c); it is not that library's code, which takes three times as long.
"""

import torch

from reports.errors import EncodingError

BLOCK, BLOCK_NBYTES = 32, 34
_LEVELS = 127
_ALMOST_HALF = torch.tensor(0.5 - 2.0**-25)  # with one half, the float just below one half would round up


def encode_q8_0(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a band of rows as Q8_0 blocks.

    Args:
        name: the weight, for messages.
        values: (R, K) fp32, K a multiple of BLOCK.

    Returns:
        (R, K / BLOCK * BLOCK_NBYTES) uint8.

    Raises:
        EncodingError: a value is NaN or infinite, or so large that the scale overflows fp16.
    """
    blocks = values.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LEVELS
    stored = scales.to(torch.float16)
    if not bool(torch.isfinite(stored).all()):
        raise EncodingError(
            "holds values that are NaN or infinite, or too large for Q8_0", where=name, remedy="Look at this tensor; export another step."
        )
    quotients = blocks * torch.where(scales == 0, 0, 1 / scales)
    rounded = quotients.add_(torch.copysign(_ALMOST_HALF, quotients)).to(torch.int8)  # which cuts off what is behind the point
    joined = torch.cat((stored.view(torch.uint8), rounded.view(torch.uint8)), 1)
    return joined.view(values.shape[0], -1)
