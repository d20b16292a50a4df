"""Writing the parts of quantized weights.

A weight's values are read once, where they are written: its scales are kept until their turn, which comes next. Where a file has the
scales first (weights whose parts do not fill whole units of alignment, see planning/pack.py), the weight is read a second time for them.

Bands are read in order by the caller and quantized by a few threads ahead of it: quantizing takes three times as long as reading. Callers
with several cores let torch use one for each thread (tasks/threads.py).
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch

from tasks.engine.encodings.cast import encode_cast, to_tensor
from tasks.engine.encodings.encoding import encode_band
from tasks.engine.encodings.encodings import BLOCKS, ENCODINGS
from tasks.engine.planning.plan import Part, TensorPlan
from tasks.engine.tensors.ops import Raw, apply_op
from tasks.engine.writing.crc import CrcPiece
from tasks.engine.writing.source_bytes import SourceBytes
from validators.layouts import layout_rows

Put = Callable[[memoryview], None]
Made = TypeVar("Made")
_THREADS = 2  # per file; they start with the first weight


class PartWriter:
    """Writes the parts of one file's quantized weights.

    Args:
        source: where from.
        band_nbytes: about how many bytes of the source a band takes; a few are held at a time.
    """

    def __init__(self, source: SourceBytes, band_nbytes: int) -> None:
        self._source = source
        self._band_nbytes = band_nbytes
        self._scales: dict[str, list[torch.Tensor]] = {}
        self._ahead: set[str] = set()  # weights whose scales were written before their values
        self._pool = ThreadPoolExecutor(_THREADS, "quantize")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(self, tensor: TensorPlan, put: Put, pieces: list[CrcPiece]) -> int:
        """Write one part.

        Args:
            tensor: a target with a part.
            put: takes its bytes, in order.
            pieces: the CRC of every range of a file that was read is appended.

        Returns:
            How many non-zero values a cast before the quantization made zero.

        Raises:
            EncodingError: a value is NaN or infinite, or a cast overflows.
        """
        assert tensor.part is not None
        if tensor.encoding in BLOCKS:
            return self._write_blocks(tensor, put, pieces)
        kind = layout_rows(ENCODINGS[tensor.encoding].scheme)[tensor.part.suffix].part
        return {"main": self._write_values, "scale": self._write_scales, "shape": _write_shape}[kind](tensor, put, pieces)

    def _write_blocks(self, tensor: TensorPlan, put: Put, pieces: list[CrcPiece]) -> int:
        flushed = 0
        for stored, lost in self._encoded(tensor, 1, BLOCKS[tensor.encoding], pieces):
            put(_bytes_of(stored))
            flushed += lost
        return flushed

    def _write_values(self, tensor: TensorPlan, put: Put, pieces: list[CrcPiece]) -> int:
        flushed, kept = 0, []
        for stored, scales, lost in self._bands(tensor, pieces):
            put(_bytes_of(stored))
            kept.append(scales)
            flushed += lost
        weight = _part_of(tensor).weight
        if weight not in self._ahead:
            self._scales[weight] = kept
        return flushed

    def _write_scales(self, tensor: TensorPlan, put: Put, pieces: list[CrcPiece]) -> int:
        weight = _part_of(tensor).weight
        if weight in self._scales:
            for scales in self._scales.pop(weight):
                put(_bytes_of(scales))
            return 0
        self._ahead.add(weight)
        for _, scales, _ in self._bands(tensor, pieces):
            put(_bytes_of(scales))
        return 0

    def _bands(self, tensor: TensorPlan, pieces: list[CrcPiece]) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        # Of each band: what is stored, its scales, and how many values the cast flushed.
        encoding = ENCODINGS[tensor.encoding]
        encode = partial(encode_band, encoding=encoding)
        for (stored, scales), lost in self._encoded(tensor, encoding.band_rows, encode, pieces):
            yield stored, scales, lost

    def _encoded(
        self, tensor: TensorPlan, unit: int, encode: Callable[[str, torch.Tensor], Made], pieces: list[CrcPiece]
    ) -> Iterator[tuple[Made, int]]:
        # Of each band of rows in multiples of `unit`: what `encode` makes of it, and how many values the cast before it flushed.
        part = _part_of(tensor)
        ahead: deque[tuple[Future[Made], int]] = deque()
        for rows, lost in self._whole_blocks(tensor, part, unit, pieces):
            ahead.append((self._pool.submit(encode, part.weight, to_tensor(rows, part.dtype)), lost))
            if len(ahead) > _THREADS:
                made, lost = ahead.popleft()
                yield made.result(), lost
        while ahead:
            made, lost = ahead.popleft()
            yield made.result(), lost

    def _whole_blocks(self, tensor: TensorPlan, part: Part, unit: int, pieces: list[CrcPiece]) -> Iterator[tuple[Raw, int]]:
        # Bands in the dtype that is quantized, of rows in multiples of `unit`, and how many values the cast flushed.
        source, lost = tensor.inputs[0].dtype, 0
        held: list[Raw] = []
        for band in self._source.bands(tensor, self._band_nbytes, pieces):
            rows = np.ascontiguousarray(apply_op(tensor.op, band))
            if source != part.dtype:
                rows, flushed = encode_cast(part.weight, rows, source, part.dtype)
                lost += flushed
            held.append(rows)
            ready = sum(len(rows) for rows in held) // unit * unit
            if ready:
                rows = held[0] if len(held) == 1 else np.concatenate(held)
                held = [rows[ready:]] if ready < len(rows) else []
                yield rows[:ready], lost
                lost = 0
        assert not held  # the encoding's `multiples` make blocks whole


def _part_of(tensor: TensorPlan) -> Part:
    assert tensor.part is not None
    return tensor.part


def _write_shape(tensor: TensorPlan, put: Put, _pieces: list[CrcPiece]) -> int:
    put(_bytes_of(torch.tensor(_part_of(tensor).shape, dtype=torch.int64)))
    return 0


def _bytes_of(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).reshape(-1).numpy().data
