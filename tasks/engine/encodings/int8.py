"""int8 with a scale per channel.

`int8` keeps activations as they are (W8A16) and is packed, four values a word; `int8-w8a8` has them quantized by the serving engine and
is stored plain. Source: compressed-tensors 0.20.1, quantization/quant_scheme.py and compressors/format.py (in which of the formats a
scheme is stored), compressors/pack_quantized/helpers.py.
"""

import torch

from tasks.engine.encodings.encoding import Encoding, round_integers
from validators.layouts import WORD_BITS, Scheme

_HALF_RANGE = 127.5
_WORD_NBYTES = WORD_BITS // 8


def _plain(quotients: torch.Tensor) -> torch.Tensor:
    return round_integers(quotients, 8)


def _packed(quotients: torch.Tensor) -> torch.Tensor:
    # The offset of half the range flips the sign bit. Bytes that only fill the last word are zero.
    offset = round_integers(quotients, 8).view(torch.uint8) ^ 0x80
    return torch.nn.functional.pad(offset, (0, -offset.shape[1] % _WORD_NBYTES)).view(torch.int32)


INT8 = Encoding("int8", Scheme("packed", "pack-quantized", "int", 8, (1, 0)), _HALF_RANGE, _packed)
INT8_W8A8 = Encoding("int8-w8a8", Scheme("plain", "int-quantized", "int", 8, (1, 0)), _HALF_RANGE, _plain)
