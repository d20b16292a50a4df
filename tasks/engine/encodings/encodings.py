"""The quantized encodings there are: those with parts of their own, and ggml's, whose blocks hold their scales. A new one is a constant or
a function in its file and a row here.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from tasks.engine.encodings.encoding import Encoding
from tasks.engine.encodings.fp8 import FP8, FP8_BLOCK
from tasks.engine.encodings.int4 import INT4
from tasks.engine.encodings.int8 import INT8, INT8_W8A8
from tasks.engine.encodings.q8_0 import encode_q8_0

ENCODINGS: Mapping[str, Encoding] = MappingProxyType({row.name: row for row in (FP8, FP8_BLOCK, INT8, INT8_W8A8, INT4)})
# What takes a weight's name and a band of its rows in fp32 to the bytes stored.
BLOCKS: Mapping[str, Callable[[str, torch.Tensor], torch.Tensor]] = MappingProxyType({"q8_0": encode_q8_0})
