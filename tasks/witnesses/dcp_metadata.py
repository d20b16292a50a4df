"""A second, independent reader of DCP's `.metadata`: an unpickler with its own closed list.

The names on the list are all that torch writes there; they are replaced by inert stand-ins, so nothing of torch is built from the file.
Anything else is refused by name and not run.

Source: pytorch torch/distributed/checkpoint/{metadata,filesystem}.py, 2.13; old saves lack `version` and the `planner_data` of newer ones.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from reports.errors import FormatError, HostilePickleError
from tasks.witnesses.boxes import Box, Ints, refuse_outside

T = TypeVar("T")


class _Record:
    # What stands in for a dataclass of torch: it only keeps the state the pickle gives it.
    __slots__ = ("state",)

    def __init__(self, *args: object) -> None:
        self.state: object = args

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, name: str) -> object:
        # Torch leaves fields that are None out of some states.
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Metadata(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()


def _size(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(lengths)  # a function: a class of ours could be changed by a pickle's BUILD


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _ignored(*_args: object) -> None:
    return None


_DCP = "torch.distributed.checkpoint."
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

# Every global a `.metadata` may name, and what stands in for it.
_CLOSED_LIST: Mapping[tuple[str, str], object] = {
    (_DCP + "metadata", "Metadata"): _Metadata,
    (_DCP + "metadata", "TensorStorageMetadata"): _Tensor,
    (_DCP + "metadata", "BytesStorageMetadata"): _Record,
    (_DCP + "metadata", "ChunkStorageMetadata"): _Record,
    (_DCP + "metadata", "TensorProperties"): _Record,
    (_DCP + "metadata", "MetadataIndex"): _Index,
    (_DCP + "metadata", "StorageMeta"): _Record,
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"): _ignored,
    (_DCP + "filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _ignored,
    ("pathlib", "PosixPath"): _joined,  # storage_meta.checkpoint_id
    ("pathlib", "PurePosixPath"): _joined,
    ("pathlib", "WindowsPath"): _joined,
    ("pathlib", "PureWindowsPath"): _joined,
    ("pathlib._local", "PosixPath"): _joined,  # Python 3.13 and later
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): name for name in _DTYPES},
    # Every rank's save plan, which Megatron keeps in it.
    **{(_DCP + "planner", name): _Record for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")},
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Record,
}

# What a pickle that is cut short or scrambled makes the unpickler raise.
_UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError)


class _ClosedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        try:
            return _CLOSED_LIST[module, name]
        except KeyError:
            raise HostilePickleError(
                f"asks for {module}.{name}, which is not on the closed list; nothing of it was run",
                where=".metadata",
                remedy="Do not use this checkpoint until you know who wrote it.",
            ) from None


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where one box of a tensor is stored: a torch.save zip of `nbytes` from `start` of `path`, relative to the checkpoint."""

    box: Box
    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor as `.metadata` lists it. `key` is torch's flat key, `path` what it was flattened from; `(key,)` when not recorded."""

    key: str
    path: tuple[str, ...]
    shape: Ints
    dtype: str
    places: tuple[ItemPlace, ...]


def read_dcp_metadata(content: bytes) -> tuple[DcpTensor, ...]:
    """Return the tensors a `.metadata` lists; entries that are objects are left out.

    Args:
        content: the bytes of the file.

    Returns:
        One entry per tensor, in the file's order; places in the order of the writer's chunks.

    Raises:
        HostilePickleError: a global outside the closed list.
        FormatError: cut short, not a DCP `.metadata`, a chunk without a place or outside the checkpoint, or bytes behind a
            stream transform.
    """
    root = _load(content)
    paths = _mapping(root, "planner_data", optional=True)
    places = _places(_mapping(root, "storage_data"))
    return tuple(_tensors(_mapping(root, "state_dict_metadata"), paths, places))


def find_dcp_objects(content: bytes) -> Mapping[str, ItemPlace]:
    """Return where a `.metadata` says that objects lie which are no tensors.

    Args:
        content: the bytes of the file.

    Returns:
        Places by key; their boxes are empty.

    Raises:
        HostilePickleError: a global outside the closed list.
        FormatError: as of `read_dcp_metadata`.
    """
    root = _load(content)
    places = _places(_mapping(root, "storage_data"))
    entries = _mapping(root, "state_dict_metadata")
    keys = [key for key, entry in entries.items() if isinstance(key, str) and not isinstance(entry, _Tensor) and (key, None) in places]
    return {key: _item(key, Box((), ()), places[key, None]) for key in keys}


def _load(content: bytes) -> _Metadata:
    try:
        root = _ClosedUnpickler(io.BytesIO(content)).load()
    except HostilePickleError:
        raise
    except _UNREADABLE as error:
        raise FormatError(f"not readable: {type(error).__name__}: {error}", where=".metadata", remedy="The save is incomplete.") from None
    if not isinstance(root, _Metadata):
        raise FormatError("does not hold a DCP Metadata object", where=".metadata")
    return root


def _mapping(root: _Record, name: str, *, optional: bool = False) -> Mapping[object, object]:
    value = root.get(name)
    return {} if value is None and optional else _expect(value, dict, name)


def _places(storage: Mapping[object, object]) -> dict[tuple[object, object], _Record]:
    places: dict[tuple[object, object], _Record] = {}
    for key, value in storage.items():
        index, stored = _expect(key, _Index, "storage_data"), _expect(value, _Record, "storage_data")
        offset = index.get("offset")
        places[index.get("fqn"), None if offset is None else _ints(offset)] = stored
    return places


def _tensors(
    entries: Mapping[object, object], paths: Mapping[object, object], places: Mapping[tuple[object, object], _Record]
) -> Iterator[DcpTensor]:
    tensors = {_expect(key, str, "a key"): entry for key, entry in entries.items() if isinstance(entry, _Tensor)}
    for key, entry in tensors.items():
        chunks = [_expect(chunk, _Record, key) for chunk in _expect(entry.get("chunks"), list, key)]
        boxes = [Box(_ints(chunk.get("offsets")), _ints(chunk.get("sizes"))) for chunk in chunks]
        path = tuple(map(str, _expect(paths.get(key, (key,)), tuple, key)))
        yield DcpTensor(key, path, _ints(entry.get("size")), _dtype(entry), tuple(_place(key, box, places) for box in boxes))


def _dtype(entry: _Tensor) -> str:
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, _Record) else ()
    dtype = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    return dtype if isinstance(dtype, str) else ""


def _place(key: str, box: Box, places: Mapping[tuple[object, object], _Record]) -> ItemPlace:
    stored = places.get((key, box.offset))
    if stored is None:
        raise FormatError(f"the chunk at {box.offset} has no place in storage_data", where=key)
    return _item(key, box, stored)


def _item(key: str, box: Box, stored: _Record) -> ItemPlace:
    if isinstance(stored.state, dict) and stored.state.get("transform_descriptors"):
        raise FormatError("stored through a stream transform", where=key)
    path = _expect(stored.get("relative_path"), str, key)
    refuse_outside(path, key)
    return ItemPlace(box, path, _expect(stored.get("offset"), int, key), _expect(stored.get("length"), int, key))


def _ints(value: object) -> Ints:
    return tuple(_expect(n, int, "a size or offset") for n in _expect(value, tuple, "a size or offset"))


def _expect(value: object, kind: type[T], where: str) -> T:
    if not isinstance(value, kind):
        raise FormatError(f"{where} is not a {kind.__name__}", where=".metadata")
    return value
