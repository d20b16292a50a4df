"""int4 with a scale per group of 128 columns, packed, eight values a word; activations stay as they are (W4A16).

Source: compressed-tensors 0.20.1, quantization/quant_scheme.py (W4A16) and compressors/pack_quantized/helpers.py.
"""

import torch

from tasks.engine.encodings.encoding import Encoding, round_integers
from validators.layouts import Scheme

_GROUP = 128


def _packed(quotients: torch.Tensor) -> torch.Tensor:
    # Two neighbours are the bytes of an int16, the first the lower one; groups fill whole words.
    pairs = (round_integers(quotients, 4) + 8).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(torch.int32)


INT4 = Encoding("int4", Scheme("packed", "pack-quantized", "int", 4, (1, _GROUP)), 7.5, _packed, multiples=(1, _GROUP))
