"""What a pickled piece of training state holds: schedules, counters, random number states, data positions, as plain values.

Trainers pickle such objects themselves and save the bytes, so a value may be a pickle again, down to MAX_DEPTH; every layer goes through
the same closed list. What is on it is harmless when the real thing is built too: a loader may be given bytes that were accepted here.

Refused: any other global, tensors in torch's format before 1.6 whose layers are not all on the list.

Source: torch 2.13, torch/storage.py (`_load_from_bytes`), torch/serialization.py (legacy format: magic, version, system, value, keys);
numpy 2, numpy/_core/multiarray.py (`_reconstruct`, `scalar`).
"""

import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Self

from reports.errors import FormatError
from tasks.engine.containers.pickle_scan import find_stop
from tasks.engine.containers.pickles import Allowed, Bag, Opaque, load_closed
from tasks.engine.containers.ranges import read_range
from tasks.engine.containers.torch_pickle import TENSOR_GLOBALS, StorageRef, StoredTensor, describe
from tasks.engine.containers.torch_zip import LEGACY_MAGIC, open_archive

MAX_DEPTH = 4
_ZIP = b"PK\x03\x04"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")


class LoadFromBytes:
    """Stand-in for `_load_from_bytes`: the value of the torch.save inside, read through the same list."""

    __slots__ = ()

    def __new__(cls, content: bytes) -> object:  # type: ignore[misc]  # returns the value in its place
        if not content.startswith(LEGACY_MAGIC):
            raise TypeError("nested bytes that are not torch's")
        return _load_legacy(content, "bytes inside a pickle")

    def __setstate__(self, state: object) -> None:
        raise TypeError("nested bytes with state of their own")


class Latin1:
    """Stand-in for `_codecs.encode`, which pickles below protocol 3 write bytes with."""

    __slots__ = ()

    def __new__(cls, text: str, encoding: str = "latin1") -> bytes:  # type: ignore[misc]  # returns the bytes in its place
        if encoding not in ("latin1", "latin-1"):
            raise TypeError(f"bytes in encoding {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise TypeError("bytes with state of their own")


class Array:
    """Stand-in for a numpy array: what it was built from."""

    __slots__ = ("state",)

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state


_NUMPY = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
STATE_GLOBALS: Allowed = MappingProxyType(
    {
        **TENSOR_GLOBALS,
        ("torch.storage", "_load_from_bytes"): LoadFromBytes,
        ("_codecs", "encode"): Latin1,
        ("collections", "defaultdict"): Bag,
        ("builtins", "dict"): Bag,
        **{(module, name): Array for module in _NUMPY for name in ("_reconstruct", "scalar")},
        ("numpy", "ndarray"): "numpy.ndarray",
        ("numpy", "dtype"): Opaque,
    }
)


def read_state(path: str, start: int, nbytes: int) -> object:
    """Return the object in a range of a file.

    Args:
        path: absolute.
        start: byte at which it begins.
        nbytes: its length.

    Returns:
        Plain values; tensors as StoredTensor, arrays as Array.

    Raises:
        HostilePickleError: a global outside the list, at any depth.
        FormatError: neither a torch.save archive nor a pickle, or damaged.
    """
    if read_range(path, start, min(nbytes, 4)) == _ZIP:
        return _unnest(describe(open_archive(path, start, nbytes), STATE_GLOBALS), path, 0)
    return load_state(read_range(path, start, nbytes), path)


def load_state(content: bytes, where: str, depth: int = 0) -> object:
    """Return the object a pickle, or a torch.save before 1.6, describes.

    Args:
        content: its bytes.
        where: the file, for messages.
        depth: how many layers are around it.

    Returns:
        Plain values and stand-ins.

    Raises:
        HostilePickleError: a global outside the list.
        FormatError: damaged, or nested too deep.
    """
    if depth > MAX_DEPTH:
        raise FormatError(f"pickles inside pickles, more than {MAX_DEPTH} deep", where=where, remedy="Save the values themselves.")
    value = _load_legacy(content, where) if content.startswith(LEGACY_MAGIC) else load_closed(content, STATE_GLOBALS, where=where)
    return _unnest(value, where, depth)


def _load_legacy(content: bytes, where: str) -> object:
    # Five pickles one after the other; the fourth is the value. Raw values follow.
    layers: list[object] = []
    at = 0
    for _ in range(5):
        layers.append(load_closed(content[at:], STATE_GLOBALS, where=where, persistent=_legacy_storage))
        at += find_stop(content[at:]) + 1
    return layers[3]


def _legacy_storage(pid: object) -> StorageRef:
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        raise TypeError("persistent id is not a storage")
    dtype, key, numel = pid[1], pid[2], pid[4]
    if not (isinstance(dtype, str) and isinstance(key, str) and type(numel) is int):
        raise TypeError("storage without type, key or length")
    return StorageRef(key, dtype, numel)


def _unnest(value: object, where: str, depth: int) -> object:
    # Bytes that are pickles again are opened too; others stay bytes.
    if isinstance(value, StoredTensor | str) or value is None:
        return value
    if isinstance(value, bytes):
        return load_state(value, where, depth + 1) if _PICKLE.match(value) and value.endswith(b".") else value
    if isinstance(value, dict):
        return {key: _unnest(child, where, depth) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unnest(child, where, depth) for child in value)
    return value


def flatten_state(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a nested object.

    Args:
        key: what the object is called.
        value: it.

    Yields:
        Dotted key, value; dicts and lists are opened, empty ones are leaves.
    """
    children = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list | tuple) else []
    if not children:
        yield key, value
    for name, child in children:
        yield from flatten_state(f"{key}.{name}", child)
