"""What the `data.pkl` of a torch.save archive describes: tensors as places in records, in nested dicts and lists; nothing is built.

Refused: any global outside TENSOR_GLOBALS (extended by formats that need more), quantized tensors, lazily negated or conjugated ones.

Source: torch 2.13, torch/_utils.py (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`, `_rebuild_parameter`), torch/serialization.py
(`persistent_id`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard, TypeVar

from reports.errors import FormatError
from tasks.engine.containers.pickles import Allowed, Bag, Opaque, load_closed
from tasks.engine.containers.torch_dtypes import DTYPES, OTHER_DTYPES, STORAGES
from tasks.engine.containers.torch_zip import REMEDY, Archive
from validators.expectation import ITEMSIZE

UNTYPED = "untyped"
MAX_VALUES = 10_000_000  # a pickle of nested lists that hold each other can describe far more than it has bytes
Leaf = TypeVar("Leaf")


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: `nbytes` bytes in record `data/<key>`. `dtype` is torch's name, "untyped" when the tensor says."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its pickle describes it: strides and `storage_offset` in elements; `dtype` is torch's name ("bfloat16")."""

    dtype: str
    storage: StorageRef
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, state: object) -> None:
        raise TypeError("a tensor with state of its own")


class _Immutable:
    # A stand-in that is called, not kept: its __new__ returns the value.
    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class RebuildV2(_Immutable):
    """Stand-in for `_rebuild_tensor_v2`: the storage knows the dtype."""

    def __new__(  # type: ignore[misc]  # returns the tensor in its place
        cls,
        storage: StorageRef,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        _grad: object,
        _hooks: object,
        lazy: object = None,
    ) -> StoredTensor:
        if lazy:
            raise TypeError("tensor is lazily conjugated or negated")
        return _tensor(storage.dtype, storage, offset, shape, strides)


class RebuildV3(_Immutable):
    """Stand-in for `_rebuild_tensor_v3`: an untyped storage, the dtype beside it."""

    def __new__(  # type: ignore[misc]  # returns the tensor in its place
        cls,
        storage: StorageRef,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        _grad: object,
        _hooks: object,
        dtype: str,
        lazy: object = None,
    ) -> StoredTensor:
        if lazy:
            raise TypeError("tensor is lazily conjugated or negated")
        return _tensor(dtype, storage, offset, shape, strides)


class RebuildParameter(_Immutable):
    """Stand-in for `_rebuild_parameter`: the tensor inside."""

    def __new__(cls, tensor: StoredTensor, *_: object) -> StoredTensor:  # type: ignore[misc]  # returns the tensor in its place
        if not isinstance(tensor, StoredTensor):
            raise TypeError(f"parameter of a {type(tensor).__name__}")
        return tensor


DTYPE_GLOBALS: Allowed = MappingProxyType({("torch", name): name for name in sorted({*DTYPES, *OTHER_DTYPES})})
TENSOR_GLOBALS: Allowed = MappingProxyType(
    {
        **DTYPE_GLOBALS,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
        ("torch.storage", "UntypedStorage"): UNTYPED,
        ("torch._utils", "_rebuild_tensor_v2"): RebuildV2,
        ("torch._utils", "_rebuild_tensor_v3"): RebuildV3,
        ("torch._utils", "_rebuild_parameter"): RebuildParameter,
        ("torch", "Size"): tuple,
        ("torch", "device"): Opaque,
        ("collections", "OrderedDict"): Bag,
    }
)


def describe(archive: Archive, allowed: Allowed = TENSOR_GLOBALS) -> object:
    """Return what an archive holds, tensors as StoredTensor.

    Args:
        archive: an opened torch.save archive.
        allowed: the closed list.

    Returns:
        The pickled object, built from stand-ins.

    Raises:
        HostilePickleError: a global outside the list.
        FormatError: damaged, big-endian, or a tensor that leaves its storage.
    """
    if "byteorder" in archive.records and archive.read("byteorder").strip() != b"little":
        raise archive.refuse("values are big-endian")
    return load_closed(archive.read("data.pkl"), allowed, where=archive.refuse("").where, persistent=_storage)


def is_tensor(value: object) -> TypeGuard[StoredTensor]:
    """Return whether a described value is a plain tensor.

    Args:
        value: part of what `describe` returned.

    Returns:
        Whether it is.
    """
    return isinstance(value, StoredTensor)


def collect_tensors(nest: object, where: str, is_leaf: Callable[[object], TypeGuard[Leaf]]) -> dict[tuple[str, ...], Leaf]:
    """Return the tensors of nested dicts and lists, by path.

    Args:
        nest: what `describe` returned.
        where: the file, for messages.
        is_leaf: whether a value stands for a tensor, such as `is_tensor`.

    Returns:
        Path → tensor, in the order of the pickle; other values are left out.

    Raises:
        FormatError: two tensors have the same path, or the nest holds itself.
    """
    found: dict[tuple[str, ...], Leaf] = {}
    pending: list[tuple[tuple[str, ...], object, frozenset[int]]] = [((), nest, frozenset())]
    for _ in range(MAX_VALUES):
        if not pending:
            return found
        path, value, parents = pending.pop()
        if is_leaf(value):
            if path in found:
                raise FormatError(f"two tensors are named {'.'.join(path)}", where=where, remedy=REMEDY)
            found[path] = value
        elif isinstance(value, (dict, list, tuple)):
            if id(value) in parents:
                raise FormatError(f"{'.'.join(path) or 'the object'} holds itself", where=where, remedy=REMEDY)
            children = value.items() if isinstance(value, dict) else enumerate(value)
            inside = parents | {id(value)}
            pending += reversed([((*path, str(key)), child, inside) for key, child in children])
    raise FormatError(f"holds more than {MAX_VALUES} values", where=where, remedy=REMEDY)


def locate_tensor(archive: Archive, tensor: StoredTensor, code: str) -> "Place":
    """Return where a tensor's values lie in the archive's file.

    Args:
        archive: the archive that describes the tensor.
        tensor: one of its tensors.
        code: its dtype as safetensors code.

    Returns:
        The byte range, strides unless it is in C order, and the recorded checksum where the range is a whole record.

    Raises:
        FormatError: the record is damaged or has another length than the storage.
    """
    itemsize = ITEMSIZE[code]
    name = f"data/{tensor.storage.key}"
    nbytes_storage = tensor.storage.numel * (1 if tensor.storage.dtype == UNTYPED else itemsize)
    record = archive.record(name)
    if record.nbytes != nbytes_storage:
        raise archive.refuse(f"record {name} has {record.nbytes} bytes, its storage {nbytes_storage}")
    start = archive.locate(name)
    begin, nbytes = tensor.storage_offset * itemsize, _extent(tensor.shape, tensor.strides) * itemsize
    if begin + nbytes > nbytes_storage:
        raise archive.refuse(f"tensor of shape {tensor.shape} leaves its storage of {nbytes_storage} bytes")
    is_whole = nbytes == nbytes_storage
    crc32 = record.crc32 if is_whole and archive.has_crc32 else None
    strides = None if _is_c_order(tensor.shape, tensor.strides) else tensor.strides
    return Place(start + begin, nbytes, strides, crc32, name, is_whole)


@dataclass(frozen=True, slots=True)
class Place:
    """`nbytes` bytes from byte `start` of a file. `is_whole` is False when they are a part of `record`, so that `crc32` is None."""

    start: int
    nbytes: int
    strides: tuple[int, ...] | None
    crc32: int | None
    record: str
    is_whole: bool


def _storage(pid: object) -> StorageRef:
    # ("storage", storage type, key, location, numel)
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
        raise TypeError("persistent id is not a storage")
    _, dtype, key, _, numel = pid
    if not (isinstance(dtype, str) and isinstance(key, str) and _is_count(numel)):
        raise TypeError("storage without type, key or length")
    return StorageRef(key, dtype, numel)


def _tensor(dtype: str, storage: StorageRef, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> StoredTensor:
    if not isinstance(storage, StorageRef) or not isinstance(dtype, str):
        raise TypeError("tensor without storage or dtype")
    dims = (*shape, *strides)
    if not (isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)):
        raise TypeError("tensor whose shape and strides differ in length")
    if not (_is_count(offset) and all(_is_count(n) for n in dims)):
        raise TypeError("tensor with a negative or fractional offset, shape or stride")
    return StoredTensor(dtype, storage, offset, shape, strides)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    # Elements from the first to the last one touched.
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    # Strides of dims of length 1 do not matter.
    expected = 1
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and step != expected:
            return 0 in shape
        expected *= n
    return True
