"""How a quantized weight is stored: which tensors, its *parts*, stand for it, and of which shapes and dtypes they are. No check of its own.

A weight is (N, K). One scale covers a *block* of rows x columns, 0 meaning all: (0, 0) per tensor, (1, 0) per channel, (1, g) per group,
(r, c) per block. The *grid* of scales has ceil(N / rows) x ceil(K / columns) entries. Of its parts, the *main* one holds the values.

Sources: compressed-tensors 0.20.1, compressors/ and quantization/lifecycle/initialize.py (packing: 32 values fill exactly `bits` words,
zero points are packed along the rows); transformers 5.24, integrations/finegrained_fp8.py, for `weight_scale_inv`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Literal

Shape = tuple[int, ...]
LayoutName = Literal["plain", "packed", "fp8 blocks", "fp8 tensors"]
Part = Literal["main", "scale", "zero", "shape", "other"]

WORD_BITS = 32
_FLOATS = frozenset({"BF16", "F16", "F32"})
_SCALES = _FLOATS | {"F8_E8M0"}  # DeepSeek's powers of two
_INTS = frozenset({"I32", "I64"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one weight is quantized. `layout` is "" for a format that is recognised and not judged; `format` is its name."""

    layout: LayoutName | Literal[""]
    format: str
    kind: str = "int"  # or "float"
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    is_symmetric: bool = True
    has_input_scale: bool = False  # activations are quantized with a scale that is stored

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Return how many scales a weight has along rows and columns.

        Args:
            shape: (N, K).

        Returns:
            At least one of each.
        """
        rows, columns = (ceil(n / b) if b else 1 for n, b in zip(shape, self.block, strict=True))
        return rows, columns

    @property
    def stored_dtype(self) -> str:
        """The dtype code of the main part."""
        if self.layout == "packed":
            return "I32"
        return "F8_E4M3" if self.kind == "float" else "I8"


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part: its name is `<module>.<suffix>`. `shapes` are those it may have, the usual one first; none where any will do."""

    suffix: str
    part: Part
    shapes: Callable[[Scheme, Shape], tuple[Shape, ...]]
    dtypes: Callable[[Scheme], frozenset[str]]
    is_required: Callable[[Scheme], bool]


def _words(scheme: Scheme, count: int) -> int:
    return ceil(count * scheme.bits / WORD_BITS)


def _grids(scheme: Scheme, shape: Shape) -> tuple[Shape, ...]:
    grid = scheme.grid(shape)
    return ((1,), (), grid) if scheme.block == (0, 0) else ((grid, grid[:1]) if scheme.block == (1, 0) else (grid,))


def _always(_scheme: Scheme) -> bool:
    return True


def _never(_scheme: Scheme) -> bool:
    return False


_PLAIN_WEIGHT = PartRow("weight", "main", lambda _, shape: (shape,), lambda s: frozenset({s.stored_dtype}), _always)
_SCALE = PartRow("weight_scale", "scale", _grids, lambda _: _FLOATS, _always)
_AROUND = (  # scales of what goes in and out, where they are stored
    PartRow("input_scale", "scale", lambda *_: (), lambda _: _FLOATS, lambda s: s.has_input_scale),
    PartRow("output_scale", "scale", lambda *_: (), lambda _: _FLOATS, _never),
    PartRow("input_zero_point", "other", lambda *_: (), lambda _: frozenset(), _never),
    PartRow("output_zero_point", "other", lambda *_: (), lambda _: frozenset(), _never),
)
LAYOUTS: Mapping[LayoutName, tuple[PartRow, ...]] = MappingProxyType(
    {
        "plain": (
            _PLAIN_WEIGHT,
            _SCALE,
            PartRow("weight_zero_point", "zero", _grids, lambda s: frozenset({s.stored_dtype}), lambda s: not s.is_symmetric),
            *_AROUND,
        ),
        "packed": (
            PartRow("weight_packed", "main", lambda s, n: ((n[0], _words(s, n[1])),), lambda s: frozenset({s.stored_dtype}), _always),
            _SCALE,
            PartRow("weight_shape", "shape", lambda *_: ((2,),), lambda _: _INTS, _always),
            PartRow(
                "weight_zero_point",
                "zero",
                lambda s, n: ((_words(s, s.grid(n)[0]), s.grid(n)[1]),),
                lambda s: frozenset({s.stored_dtype}),
                lambda s: not s.is_symmetric,
            ),
            PartRow("weight_g_idx", "other", lambda _, n: (n[1:],), lambda _: _INTS, _never),  # until 2026, activation ordering
            *_AROUND,
        ),
        "fp8 blocks": (
            _PLAIN_WEIGHT,
            PartRow("weight_scale_inv", "scale", _grids, lambda _: _SCALES, _always),
            PartRow("activation_scale", "scale", lambda *_: (), lambda _: _FLOATS, _never),
            *_AROUND,
        ),
        "fp8 tensors": (
            _PLAIN_WEIGHT,
            PartRow("weight_scale", "scale", lambda _, n: ((1,), (), (n[0], 1), n[:1]), lambda _: _FLOATS, _always),
            *_AROUND,
        ),
    }
)
# compressed-tensors: the layout of each of its formats. Others (NVFP4, MXFP4, 2:4) are recognised and not judged.
LAYOUT_OF_FORMAT: Mapping[str, LayoutName] = MappingProxyType(
    {"float-quantized": "plain", "int-quantized": "plain", "naive-quantized": "plain", "pack-quantized": "packed"}
)
# Methods of which only the names are known: parts that must be there.
NAMED_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gptq": ("qweight", "qzeros", "scales"), "awq": ("qweight", "qzeros", "scales")}
)
# Files that declare a quantization where config.json does not, and the method they mean.
DECLARING_FILES: Mapping[str, str] = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)
# A tensor of such a name is part of a quantized weight, whatever its module.
TELLING_SUFFIXES = frozenset(
    {
        *(row.suffix for rows in LAYOUTS.values() for row in rows if row.suffix.startswith("weight_")),
        *("qweight", "qzeros", "weight_global_scale"),
    }
)
SUFFIXES_AROUND = frozenset({"activation_scale", "input_global_scale", *(row.suffix for row in _AROUND)})
CACHE_SUFFIXES = frozenset({"q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point"})
MAIN_SCALES = frozenset({"weight_scale", "weight_scale_inv"})
LARGEST_E4M3 = 448.0
MAIN_SUFFIXES = ("weight_packed", "qweight", "weight")


def layout_rows(scheme: Scheme) -> Mapping[str, PartRow]:
    """Return the parts of a weight that is quantized so.

    Args:
        scheme: with a layout.

    Returns:
        Rows by suffix.
    """
    assert scheme.layout
    return {row.suffix: row for row in LAYOUTS[scheme.layout]}
