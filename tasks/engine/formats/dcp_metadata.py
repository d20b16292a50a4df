"""The `.metadata` pickle of PyTorch Distributed Checkpoint, read through a closed list into plain values.

An *item* is one entry of the saved state dict: a tensor in chunks, or an object pickled by torch.save. A *path* is an item's place in the
nested state dict, from the planner's own record (`planner_data`): keys are never split at dots, since names contain them.

Source: torch 2.13, torch/distributed/checkpoint/metadata.py and filesystem.py; fields that older releases lack have defaults.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType

from reports.errors import FormatError, HostilePickleError, name_some
from tasks.engine.containers.pickles import Allowed, Bag, Opaque, Record, load_closed
from tasks.engine.containers.torch_pickle import DTYPE_GLOBALS

REMEDY = "Restore the folder from another copy or export another step."
Offset = tuple[int, ...]


class MetadataRecord(Record):
    """Stand-in for `Metadata`."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "storage_meta", "version")


class TensorRecord(Record):
    """Stand-in for `TensorStorageMetadata`: `chunks` are ChunkRecords."""

    __slots__ = ("chunks", "properties", "size")


class ObjectRecord(Record):
    """Stand-in for `BytesStorageMetadata`: nothing is known of the object."""

    __slots__ = ()


class PropertiesRecord:
    """Stand-in for `TensorProperties`: of its five fields only the dtype (torch's name) matters."""

    __slots__ = ("dtype",)

    def __setstate__(self, state: object) -> None:
        # Five fields; a dict of attributes in older releases.
        first = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) else None
        if not isinstance(first, str):
            raise TypeError("tensor properties without a dtype")
        self.dtype = first


# The three records below occur once per chunk. Their states are emptied, since the unpickler keeps every one of them until the end.
class ChunkRecord:
    """Stand-in for `ChunkStorageMetadata`."""

    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, Offset]) -> None:
        self.offsets = state.pop("offsets")
        self.sizes = state.pop("sizes")
        if state:
            raise AttributeError(f"chunk has fields {name_some(map(str, state))}")


class IndexRecord:
    """Stand-in for `MetadataIndex`; compared by identity, since readers group by name and offset themselves."""

    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.fqn = state.pop("fqn")
        self.offset = state.pop("offset", None)
        state.pop("index", None)  # a hint only
        if state:
            raise AttributeError(f"index has fields {name_some(map(str, state))}")


class StorageRecord:
    """Stand-in for `_StorageInfo`: an item's bytes are [offset, offset + length) of a file."""

    __slots__ = ("length", "offset", "relative_path", "transforms")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.relative_path = state.pop("relative_path")
        self.offset = state.pop("offset")
        self.length = state.pop("length")
        self.transforms = state.pop("transform_descriptors", None)
        if state:
            raise AttributeError(f"storage has fields {name_some(map(str, state))}")


_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where torch before 2.3 had the tensor properties
METADATA_GLOBALS: Allowed = MappingProxyType(
    {
        **DTYPE_GLOBALS,
        (_METADATA, "Metadata"): MetadataRecord,
        (_METADATA, "TensorStorageMetadata"): TensorRecord,
        (_METADATA, "BytesStorageMetadata"): ObjectRecord,
        (_METADATA, "TensorProperties"): PropertiesRecord,
        (_METADATA, "ChunkStorageMetadata"): ChunkRecord,
        (_METADATA, "MetadataIndex"): IndexRecord,
        (_METADATA, "StorageMeta"): Opaque,
        (_METADATA, "_MEM_FORMAT_ENCODING"): Opaque,
        (_SHARDED, "TensorProperties"): PropertiesRecord,
        (_SHARDED, "MEM_FORMAT_ENCODING"): Opaque,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageRecord,
        ("torch.serialization", "_get_layout"): Opaque,
        ("torch", "Size"): tuple,
        ("pathlib", "PosixPath"): Opaque,  # storage_meta.checkpoint_id: where it was saved
        ("pathlib", "WindowsPath"): Opaque,
        ("pathlib", "PurePosixPath"): Opaque,
        ("pathlib", "PureWindowsPath"): Opaque,
        ("pathlib._local", "PosixPath"): Opaque,  # Python 3.13 pickles it so
        ("collections", "OrderedDict"): Bag,
    }
)


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where one item, or one chunk of a tensor, lies: [start, start + nbytes) of `path`, relative to the folder."""

    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the state dict. `chunks` are (offset, shape) in the writer's order; `dtype` is torch's name."""

    key: str
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Offset, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class SavedObject:
    """An object of the state dict, pickled by torch.save; nothing is known of it."""

    key: str
    path: tuple[str, ...]


class DcpMetadata:
    """What one `.metadata` says.

    Args:
        content: the file's bytes.
        where: the file, for messages.
        allowed: the closed list.

    Raises:
        HostilePickleError: a global outside the list.
        FormatError: cut short, damaged, or not of this format.
    """

    def __init__(self, content: bytes, where: str, allowed: Allowed = METADATA_GLOBALS) -> None:
        self.where = where
        try:
            root = load_closed(content, allowed, where=where)
        except HostilePickleError:
            raise
        except FormatError as error:
            raise FormatError(f"incomplete save: {error.what}", where=where, remedy=REMEDY) from error
        if not isinstance(root, MetadataRecord):
            raise self._refuse(f"pickle of a {type(root).__name__}, not of a checkpoint's metadata")
        items = getattr(root, "state_dict_metadata", None)
        stored = getattr(root, "storage_data", None)
        if not isinstance(items, dict) or not isinstance(stored, dict):
            raise self._refuse("metadata without items or without their places")
        self._root = root
        planner = getattr(root, "planner_data", None)
        self._planner: Mapping[object, object] = planner if isinstance(planner, dict) else {}
        self._items: dict[object, object] = items
        self._paths: dict[str, str] = {}
        self._places: dict[str, dict[Offset | None, StorageRecord]] = {}
        for index, place in stored.items():
            self._add_place(index, place)

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> Iterator[SavedTensor | SavedObject]:
        """Yield every item.

        Yields:
            Tensors and objects, in the writer's order.

        Raises:
            FormatError: an item's metadata is malformed.
        """
        for key, item in self._items.items():
            if not isinstance(key, str):
                raise self._refuse(f"an item's name is {key!r}, not text")
            if isinstance(item, ObjectRecord):
                yield SavedObject(key, self._path(key))
            elif isinstance(item, TensorRecord):
                yield self._tensor(key, item)
            else:
                raise self._refuse(f"{key}: neither a tensor nor an object")

    def field(self, name: str) -> object:
        """Return a field of the metadata that DCP itself does not have.

        Args:
            name: one that the closed list's stand-in keeps.

        Returns:
            Its value; None where the writer stored none.
        """
        return getattr(self._root, name, None)

    def place(self, key: str, offset: Offset | None) -> StoredItem:
        """Return where a chunk (or an object, with offset None) lies.

        Args:
            key: an item's key.
            offset: the chunk's first index per dim.

        Returns:
            Its place.

        Raises:
            FormatError: the metadata does not say.
        """
        record = self._places.get(key, {}).get(offset)
        if record is None:
            raise self._refuse(f"{key}: the metadata does not say where the chunk at {offset} lies")
        assert isinstance(record.relative_path, str)
        assert isinstance(record.offset, int)
        assert isinstance(record.length, int)
        return StoredItem(record.relative_path, record.offset, record.length)

    def needed_nbytes(self) -> dict[str, int]:
        """Return the files items lie in.

        Returns:
            Relative path → bytes the file must have at least; sorted.
        """
        needed: dict[str, int] = {}
        for places in self._places.values():
            for record in places.values():
                assert isinstance(record.relative_path, str)
                assert isinstance(record.offset, int)
                assert isinstance(record.length, int)
                end = record.offset + record.length
                if end > needed.get(record.relative_path, 0):
                    needed[record.relative_path] = end
        return dict(sorted(needed.items()))

    def _add_place(self, index: object, place: object) -> None:
        if not isinstance(index, IndexRecord) or not isinstance(place, StorageRecord) or not isinstance(index.fqn, str):
            raise self._refuse("an item's place is malformed")
        fqn, offset, path = index.fqn, index.offset, place.relative_path
        if not (offset is None or isinstance(offset, tuple)) or not isinstance(path, str):
            raise self._refuse(f"{fqn}: its place is malformed")
        if not (_is_count(place.offset) and _is_count(place.length)):
            raise self._refuse(f"{fqn}: lies at {place.offset!r} with length {place.length!r}")
        if place.transforms:
            raise FormatError(
                f"{fqn} was written through a stream transform ({place.transforms}), so its bytes are not plain",
                where=self.where,
                remedy="Save again without transform extensions (compression, encryption).",
            )
        if path not in self._paths:
            self._paths[path] = self._inside(path)
        place.relative_path = self._paths[path]
        places = self._places.setdefault(fqn, {})
        if offset in places:
            raise self._refuse(f"{fqn}: the chunk at {offset} lies in two places")
        places[offset] = place

    def _inside(self, path: str) -> str:
        pure = PurePosixPath(path.replace("\\", "/"))
        if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or ":" in pure.parts[0]:
            raise self._refuse(f"names a file outside the checkpoint: {path!r}")
        return str(pure)

    def _path(self, key: str) -> tuple[str, ...]:
        path = self._planner.get(key)
        if path is None:
            return (key,)
        if not isinstance(path, tuple) or not path or not all(isinstance(part, (str, int)) for part in path):
            raise self._refuse(f"{key}: its path in the state dict is malformed")
        return tuple(str(part) for part in path)

    def _tensor(self, key: str, item: TensorRecord) -> SavedTensor:
        properties, size = getattr(item, "properties", None), getattr(item, "size", None)
        chunks = getattr(item, "chunks", None)
        if not isinstance(properties, PropertiesRecord) or not _is_dims(size) or not isinstance(chunks, list):
            raise self._refuse(f"{key}: a tensor without dtype, shape or chunks")
        assert isinstance(size, tuple)
        ndim, boxes = len(size), []
        for chunk in chunks:
            if not (isinstance(chunk, ChunkRecord) and _is_dims(chunk.offsets) and _is_dims(chunk.sizes)):
                raise self._refuse(f"{key}: a malformed chunk")
            if len(chunk.offsets) != ndim or len(chunk.sizes) != ndim:
                raise self._refuse(f"{key}: chunk {chunk.offsets} of shape {chunk.sizes} in a tensor of shape {size}")
            boxes.append((chunk.offsets, chunk.sizes))
        return SavedTensor(key, self._path(key), properties.dtype, size, tuple(boxes))

    def _refuse(self, what: str) -> FormatError:
        return FormatError(what, where=self.where, remedy=REMEDY)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_dims(value: object) -> bool:
    if type(value) is not tuple:
        return False
    return all(type(n) is int and n >= 0 for n in value)
