"""The quantized encodings there are. A new one is a constant in its file and a row here."""

from collections.abc import Mapping
from types import MappingProxyType

from tasks.engine.encodings.encoding import Encoding
from tasks.engine.encodings.fp8 import FP8, FP8_BLOCK
from tasks.engine.encodings.int4 import INT4
from tasks.engine.encodings.int8 import INT8, INT8_W8A8

ENCODINGS: Mapping[str, Encoding] = MappingProxyType({row.name: row for row in (FP8, FP8_BLOCK, INT8, INT8_W8A8, INT4)})
