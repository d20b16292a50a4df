"""The parts of quantized weights, read from disk: what their scales are, and how far the dequantized values are from the source's.

A value q of a weight stands for (q - zero point) x scale; the fp8 method's `weight_scale_inv` is such a scale, for all its name. Rows are
read, unpacked and compared in bands: memory holds one band per worker, and the scales of one weight.

Source: compressed-tensors 0.20.1, compressors/pack_quantized/helpers.py (value i of a row begins at bit i x bits; stored with an offset of
half the range) and quantization/lifecycle/forward_helpers.py.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.threads import one_torch_thread
from tasks.witnesses.boxes import Box, read_box
from tasks.witnesses.second_path import SecondPath
from validators.layouts import WORD_BITS, Part, Scheme, layout_rows
from validators.quantization import QuantizedWeight, read_quantization
from validators.release import Release, StoredTensor
from validators.tables import format_shape

_BAND_NUMEL = 1 << 20
_MAX_SHAPE_DIMS = 8  # a part that writes a shape down is no longer
# Torch's name of the dtypes that parts may have.
_SCALES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E8M0": torch.float8_e8m0fnu,  # powers of two
}
DTYPES: Mapping[str, torch.dtype] = {
    **_SCALES,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Stored:
    # A part that can be read. `start` is the byte where its values begin.
    path: Path
    start: int
    tensor: StoredTensor

    def read(self, rows: tuple[int, int] | None = None) -> torch.Tensor:
        shape = self.tensor.shape
        box = Box((0,) * len(shape), shape)
        if rows is not None:
            box = Box((rows[0], *box.offset[1:]), (rows[1] - rows[0], *shape[1:]))
        with self.path.open("rb", buffering=0) as file:
            return read_box(file.fileno(), self.path, self.start, DTYPES[self.tensor.dtype], shape, box).contiguous()

    def pieces(self) -> Iterator[torch.Tensor]:
        shape = self.tensor.shape
        with self.path.open("rb", buffering=0) as file:
            for box in Box((0,) * len(shape), shape).cut(_BAND_NUMEL):
                yield read_box(file.fileno(), self.path, self.start, DTYPES[self.tensor.dtype], shape, box)


@dataclass(frozen=True, slots=True)
class _Readable:
    # A weight whose parts are all as its scheme says: `shape` is (N, K), `scales` and `zeros` are grids in fp32, `columns` says which
    # column of a grid each column of the weight belongs to.
    main: _Stored
    scheme: Scheme
    shape: tuple[int, int]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    columns: torch.Tensor


def measure_parts(release: Release, witness: SecondPath | None, workers: int) -> list[dict[str, object]]:
    """Measure every part of every quantized weight, and the scales of the key-value cache.

    Args:
        release: headers and config of a folder.
        witness: a second reading of the source; None where there is no source.
        workers: how many weights are read at the same time.

    Returns:
        Rows of a PartTable, in the order of the release's weights.
    """
    said = read_quantization(release)
    if not said.method:
        return []
    starts = {file.name: file.data_start for file in release.files}
    sizes = {file.name: file.nbytes for file in release.files}
    assert release.folder is not None
    stored = {
        tensor.name: _Stored(release.folder / tensor.file, starts[tensor.file] + tensor.start, tensor)
        for tensor in release.stored()
        if tensor.name in said.encoded and _is_intact(tensor, sizes[tensor.file] - starts[tensor.file])
    }
    rows = [_scale_row(stored[name]) for name in said.cache if name in stored and stored[name].tensor.dtype in _SCALES]
    with one_torch_thread(), ThreadPoolExecutor(workers) as pool:
        for found in pool.map(lambda weight: _weight_rows(weight, stored, witness), said.weights.values()):
            rows += found
    return list({row["name"]: row for row in rows}.values())  # what k_proj puts out has a scale of the weight's and of the cache's


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the values that 32-bit words hold one behind the other.

    Args:
        words: (R, W) int32.
        bits: of a value, 1 to 8; values may go over from one word to the next.
        count: values per row.

    Returns:
        (R, count) int32, from -2^(bits-1).
    """
    half = 1 << (bits - 1)
    if bits == 4:  # as nearly always: two values a byte
        nibbles = words.reshape(-1).view(torch.uint8)
        both = torch.stack((nibbles & 15, nibbles >> 4), -1)
        return both.view(words.shape[0], -1)[:, :count].to(torch.int32) - half
    first = torch.arange(count) * bits
    word, shift = first // WORD_BITS, first % WORD_BITS
    wide = words.to(torch.int64) & 0xFFFFFFFF
    high = wide[:, (word + 1).clamp(max=words.shape[1] - 1)]
    joined = wide[:, word] | (high << WORD_BITS)
    values = (joined >> shift) & ((1 << bits) - 1)
    return values.to(torch.int32) - half


def _is_intact(tensor: StoredTensor, data_nbytes: int) -> bool:
    dtype = DTYPES.get(tensor.dtype)
    return dtype is not None and tensor.stop <= data_nbytes and tensor.stop - tensor.start == math.prod(tensor.shape) * dtype.itemsize


def _weight_rows(weight: QuantizedWeight, stored: Mapping[str, _Stored], witness: SecondPath | None) -> list[dict[str, object]]:
    if weight.scheme is None or not weight.scheme.layout:
        return []
    kinds: dict[str, Part] = {suffix: row.part for suffix, row in layout_rows(weight.scheme).items()}
    rows = []
    for suffix, tensor in weight.parts.items():
        part, kind = stored.get(tensor.name), kinds.get(suffix, "other")
        if part is None:
            continue
        if kind == "scale" and tensor.dtype in _SCALES:
            rows.append(_scale_row(part))
        elif kind == "zero" and (zeros := _zero_points(part, weight.scheme)) is not None:
            rows.append(_row(part, low=float(zeros.min()), high=float(zeros.max())))
        elif kind == "shape" and math.prod(tensor.shape) <= _MAX_SHAPE_DIMS:
            rows.append(_row(part, listed=format_shape(tuple(int(n) for n in part.read().reshape(-1)))))
        elif kind == "main":
            error, rounding = _compare(weight, stored, witness)
            rows.append(_row(part, relative_error=error, rounding=rounding))
    return rows


def _row(part: _Stored, **measured: object) -> dict[str, object]:
    nothing = {"low": math.nan, "high": math.nan, "nonfinite": 0, "listed": "", "relative_error": math.nan, "rounding": math.nan}
    return {"name": part.tensor.name, **nothing, **measured}


def _scale_row(part: _Stored) -> dict[str, object]:
    low, high, nonfinite = math.inf, -math.inf, 0
    for values in (piece.to(torch.float64) for piece in part.pieces()):
        finite = values[torch.isfinite(values)]
        nonfinite += values.numel() - finite.numel()
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return _row(part, low=low, high=high, nonfinite=nonfinite) if low <= high else _row(part, nonfinite=nonfinite)


def _zero_points(part: _Stored, scheme: Scheme, groups: tuple[int, int] | None = None) -> torch.Tensor | None:
    # As numbers: of packed ones, along the rows. Without the grid's size, rows that only fill the last word are among them.
    values = part.read()
    if scheme.layout != "packed":
        return values.to(torch.float32) if values.numel() else None
    if values.dim() != 2 or values.dtype != torch.int32 or not values.numel():
        return None
    count = values.shape[0] * WORD_BITS // scheme.bits if groups is None else groups[0]
    return unpack(values.T, scheme.bits, count).T.to(torch.float32)


def _compare(weight: QuantizedWeight, stored: Mapping[str, _Stored], witness: SecondPath | None) -> tuple[float, float]:
    # Relative rms of the dequantized weight against the source, and what rounding alone leaves; NaN where they cannot be had.
    target = witness.targets.get(weight.name) if witness is not None else None
    if witness is None or target is None or len(target.shape) != 2:
        return math.nan, math.nan
    readable = _readable(weight, stored, (target.shape[0], target.shape[1]))
    if readable is None:
        return math.nan, math.nan
    errors = sources = 0.0
    for rows in _bands(readable.shape):
        found = _dequantize(readable, rows)
        for piece in witness.pieces(weight.name, _BAND_NUMEL, rows=rows):
            origin = piece.values.to(torch.float32)
            at = tuple(
                slice(o - (rows[0] if d == 0 else 0), o - (rows[0] if d == 0 else 0) + n) for d, (o, n) in enumerate(_spans(piece.box))
            )
            errors += _squares(found[at] - origin)
            sources += _squares(origin)
    if sources == 0:
        return (0.0, 0.0) if errors == 0 else (math.inf, 0.0)
    return math.sqrt(errors / sources), math.sqrt(_step_squares(readable) / 12 / sources)


def _squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _step_squares(weight: _Readable) -> float:
    # The sum over the weight's values of their scales' squares.
    tall, wide = weight.scales.shape
    over_rows = torch.bincount(_grid_rows(weight.scales, weight, (0, weight.shape[0])), minlength=tall).to(torch.float64)
    over_columns = torch.bincount(weight.columns, minlength=wide).to(torch.float64)
    return float(over_rows @ weight.scales.to(torch.float64).square() @ over_columns)


def _spans(box: Box) -> Iterator[tuple[int, int]]:
    return iter(zip(box.offset, box.shape, strict=True))


def _readable(weight: QuantizedWeight, stored: Mapping[str, _Stored], shape: tuple[int, int]) -> _Readable | None:
    scheme = weight.scheme
    assert scheme is not None
    parts: dict[str, _Stored] = {}
    for suffix, row in layout_rows(scheme).items():
        tensor = weight.parts.get(suffix)
        if tensor is None or row.part not in ("main", "scale", "zero") or not suffix.startswith("weight"):
            continue
        if tensor.name not in stored or tensor.shape not in row.shapes(scheme, shape) or tensor.dtype not in row.dtypes(scheme):
            return None  # said by its finding
        parts[row.part] = stored[tensor.name]
    if "main" not in parts or "scale" not in parts or (not scheme.is_symmetric and "zero" not in parts):
        return None
    grid = scheme.grid(shape)
    scales = parts["scale"].read().to(torch.float32)
    zeros = _zero_points(parts["zero"], scheme, grid) if "zero" in parts else None
    rows = scales.numel() if scheme.layout == "fp8 tensors" else grid[0]  # that layout may have one scale per row instead
    columns = _columns(weight, stored, scheme, shape)
    if columns is None or not 0 <= int(columns.min()) <= int(columns.max()) < grid[1]:
        return None
    return _Readable(parts["main"], scheme, shape, scales.reshape(rows, -1), None if zeros is None else zeros.reshape(grid), columns)


def _columns(weight: QuantizedWeight, stored: Mapping[str, _Stored], scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor | None:
    # In order, or as the weight writes down when columns were sorted before they were grouped.
    if "weight_g_idx" not in weight.parts:
        return torch.arange(shape[1]) // (scheme.block[1] or shape[1])
    written = stored.get(weight.parts["weight_g_idx"].name)
    return written.read().to(torch.int64) if written is not None and written.tensor.shape == shape[1:] else None


def _bands(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    step = max(1, _BAND_NUMEL // max(1, shape[1]))
    return ((at, min(shape[0], at + step)) for at in range(0, shape[0], step))


def _dequantize(weight: _Readable, rows: tuple[int, int]) -> torch.Tensor:
    # (rows, K) fp32.
    values = weight.main.read(rows)
    if weight.scheme.layout == "packed":
        values = unpack(values, weight.scheme.bits, weight.shape[1])
    wide = values.to(torch.float32)
    if weight.zeros is not None:
        wide -= _over(weight.zeros, weight, rows)
    return wide.mul_(_over(weight.scales, weight, rows))


def _over(grid: torch.Tensor, weight: _Readable, rows: tuple[int, int]) -> torch.Tensor:
    # A grid's entries, each over the values of its block.
    chosen = grid[_grid_rows(grid, weight, rows)]
    return chosen.index_select(1, weight.columns) if grid.shape[1] > 1 else chosen


def _grid_rows(grid: torch.Tensor, weight: _Readable, rows: tuple[int, int]) -> torch.Tensor:
    return torch.arange(*rows) // (weight.scheme.block[0] or (1 if grid.shape[0] > 1 else weight.shape[0]))
