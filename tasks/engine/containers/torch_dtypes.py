"""How torch names dtypes, as safetensors codes. A dtype without a row is named in the refusal where a model tensor has it.

Source: torch 2.13, torch/storage.py (`_dtype_to_storage_type_map`); safetensors 0.8, README.
"""

from collections.abc import Mapping
from types import MappingProxyType

# `torch.<name>` → safetensors code
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int16": "I16",
        "uint16": "U16",
        "float16": "F16",
        "bfloat16": "BF16",
        "int32": "I32",
        "uint32": "U32",
        "float32": "F32",
        "int64": "I64",
        "uint64": "U64",
        "float64": "F64",
    }
)

# dtypes torch has and the release format has not; a file may name them for training state
OTHER_DTYPES = frozenset(
    {"complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}
    | {"qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
)

# `torch.<name>` of a typed storage → `torch.<dtype>`
STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "BoolStorage": "bool",
        "ByteStorage": "uint8",
        "CharStorage": "int8",
        "ShortStorage": "int16",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "IntStorage": "int32",
        "FloatStorage": "float32",
        "LongStorage": "int64",
        "DoubleStorage": "float64",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
        "QInt8Storage": "qint8",
        "QUInt8Storage": "quint8",
        "QInt32Storage": "qint32",
        "QUInt4x2Storage": "quint4x2",
        "QUInt2x4Storage": "quint2x4",
    }
)
