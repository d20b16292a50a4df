"""Tensors inside torch.save files, found by torch's own loader and then read piece by piece.

`torch.load(weights_only=True, map_location="meta")` reads everything of the file but the values, and tells where each storage begins. So
torch itself says what lies where, and no more than one piece is ever in memory. A tensor that was not saved in C order is loaded whole.

Source: pytorch torch/serialization.py 2.13, `load_tensor` (`_checkpoint_offset`); measured: 0.3 ms an item.
"""

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

import torch

from reports.errors import FormatError
from tasks.witnesses.boxes import Box, Ints, ReadBox, StoredBox, read_box


class Window(io.RawIOBase):
    """A part of a file that reads like a file of its own.

    Args:
        fd: the open file.
        start: byte where the part begins.
        nbytes: its length.
    """

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        super().__init__()
        self._fd, self._start, self._nbytes, self._at = fd, start, nbytes, 0

    def readable(self) -> bool:
        """Say that it can be.

        Returns:
            True.
        """
        return True

    def seekable(self) -> bool:
        """Say that it can be.

        Returns:
            True.
        """
        return True

    def tell(self) -> int:
        """Return the position.

        Returns:
            Bytes from the start of the window.
        """
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position of the window.

        Args:
            offset: bytes from where `whence` says.
            whence: os.SEEK_SET, SEEK_CUR or SEEK_END.

        Returns:
            The new position.
        """
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        return self._at

    def readinto(self, buffer: memoryview | bytearray) -> int:  # type: ignore[override]  # typeshed asks for Buffer, which is 3.12
        """Fill the buffer from the position on.

        Args:
            buffer: as many bytes as wanted.

        Returns:
            How many were read; 0 at the end of the window.
        """
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        got = os.preadv(self._fd, [view], self._start + self._at) if len(view) else 0
        self._at += got
        return got


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A box whose values lie in C order from byte `start` of `path`."""

    path: Path
    start: int
    dtype: torch.dtype
    box: Box

    @contextmanager
    def open(self) -> Iterator[ReadBox]:
        """Open the file; the function inside reads any part of the box.

        Yields:
            The function.
        """
        with self.path.open("rb", buffering=0) as file:
            yield partial(_read_raw, file.fileno(), self)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A box whose values are one tensor of a torch.save file, found when it is opened.

    The file is `nbytes` from `start` of `path`. `key` names the tensor when the file holds a mapping; None when it holds one tensor alone.
    """

    path: Path
    start: int
    nbytes: int
    key: str | None
    box: Box

    @contextmanager
    def open(self) -> Iterator[ReadBox]:
        """Open the file; the function inside reads any part of the box.

        Yields:
            The function.

        Raises:
            FormatError: torch cannot load the item, or it is no tensor of this box's shape.
        """
        with self.path.open("rb", buffering=0) as file:
            fd = file.fileno()
            meta = self._pick(load_item(fd, self.path, self.start, self.nbytes, map_location="meta"))
            first = _first_byte(meta, self.start)
            if first is not None:
                yield partial(_read_raw, fd, RawTensor(self.path, first, meta.dtype, self.box))
            else:
                whole = self._pick(load_item(fd, self.path, self.start, self.nbytes, map_location="cpu"))
                yield lambda at, shape: whole[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))]

    def _pick(self, loaded: object) -> torch.Tensor:
        tensor = loaded if self.key is None else loaded.get(self.key) if isinstance(loaded, dict) else None
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.box.shape:
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise FormatError(f"expected a tensor {self.box.shape}, found {found}", where=f"{self.path} at byte {self.start}")
        return tensor


def load_item(fd: int, path: Path, start: int, nbytes: int, *, map_location: str) -> object:
    """Load one torch.save file that lies inside another file; no pickle code runs.

    Args:
        fd: the open outer file.
        path: its name, for messages.
        start: byte where the inner file begins.
        nbytes: its length.
        map_location: "meta" for everything but the values, or "cpu".

    Returns:
        What was saved.

    Raises:
        FormatError: torch refuses it.
    """
    try:
        loaded: object = torch.load(cast("IO[bytes]", Window(fd, start, nbytes)), weights_only=True, map_location=map_location)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FormatError(f"torch cannot load this item: {reason}", where=f"{path} at byte {start}") from None
    return loaded


def list_tensors(path: Path) -> dict[str, StoredBox]:
    """Return the tensors of a torch.save file that holds a flat mapping of names.

    Args:
        path: the file.

    Returns:
        Each tensor as a box that is all of it, in the file's order.

    Raises:
        FormatError: torch refuses the file, or it holds something else.
    """
    nbytes = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        loaded = load_item(file.fileno(), path, 0, nbytes, map_location="meta")
    if not isinstance(loaded, dict):
        raise FormatError(f"holds a {type(loaded).__name__}, not a mapping of names to tensors", where=str(path))
    tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}
    stored: dict[str, StoredBox] = {}
    for name, meta in tensors.items():
        box, first = Box((0,) * meta.ndim, tuple(meta.shape)), _first_byte(meta, 0)
        stored[name] = SavedTensor(path, 0, nbytes, name, box) if first is None else RawTensor(path, first, meta.dtype, box)
    return stored


def locate_values(meta: torch.Tensor, path: Path) -> int:
    """Return where the values of a tensor begin in its file.

    Args:
        meta: a tensor of a whole file, loaded onto the meta device.
        path: the file.

    Returns:
        The byte.

    Raises:
        FormatError: they do not lie there in C order.
    """
    first = _first_byte(meta, 0)
    if first is None:
        raise FormatError(f"a tensor of shape {tuple(meta.shape)} is not stored in C order", where=str(path))
    return first


def _first_byte(meta: torch.Tensor, start: int) -> int | None:
    # Where a tensor's values begin in the outer file; None when they do not lie there in C order and little-endian.
    offset = meta.untyped_storage()._checkpoint_offset
    if offset is None or not meta.is_contiguous() or sys.byteorder != "little":
        return None
    return start + int(offset) + int(meta.storage_offset()) * meta.dtype.itemsize


def _read_raw(fd: int, raw: RawTensor, at: Ints, shape: Ints) -> torch.Tensor:
    return read_box(fd, raw.path, raw.start, raw.dtype, raw.box.shape, Box(at, shape))
