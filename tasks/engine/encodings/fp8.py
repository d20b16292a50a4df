"""fp8: e4m3 values with a scale per channel, or per block of 128 x 128. Activations are quantized by the serving engine.

Blocks are kept whole: engines cut such weights along whole blocks, so a weight whose dims are no multiples of 128 is not stored so.
Source: compressed-tensors 0.20.1, quantization/quant_scheme.py (FP8_DYNAMIC, FP8_BLOCK).
"""

import torch

from tasks.engine.encodings.encoding import Encoding
from validators.layouts import Scheme

_LARGEST = 448.0  # of e4m3
_BLOCK = (128, 128)


def _to_e4m3(quotients: torch.Tensor) -> torch.Tensor:
    # Adding zero makes zeros positive, as the library's zero points do. Beyond the largest value torch makes NaN.
    return quotients.add_(0.0).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


FP8 = Encoding("fp8", Scheme("plain", "float-quantized", "float", 8, (1, 0)), _LARGEST, _to_e4m3)
FP8_BLOCK = Encoding("fp8-block", Scheme("plain", "float-quantized", "float", 8, _BLOCK), _LARGEST, _to_e4m3, multiples=_BLOCK)
