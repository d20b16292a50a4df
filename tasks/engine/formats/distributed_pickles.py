"""How torch pickles one rank's part of a ShardedTensor or a DTensor, through a closed list, as boxes of the whole tensor.

A ShardedTensor records its boxes. A DTensor records placements, the mesh's sizes and the rank's coordinates on it; its box follows from
them: rows are cut as `torch.chunk` cuts, along mesh axes from left to right, except that a strided axis (FSDP over TP) cuts what the axes
right of it have left.

Refused: pending sums (Partial), mesh axes in another order, strided placements that do not come from FSDP over TP, parts whose shape
contradicts the placements.

Source: torch 2.13, torch/distributed/_shard/sharded_tensor/api.py (`__getstate__`), torch/distributed/tensor/_api.py, placement_types.py,
device_mesh.py; for older meshes torch 2.4, device_mesh.py.
"""

from math import prod
from types import MappingProxyType
from typing import Self, TypeGuard

from tasks.engine.containers.pickles import Allowed, Opaque, Record, state_fields
from tasks.engine.containers.torch_pickle import TENSOR_GLOBALS, StoredTensor
from tasks.engine.formats.dcp_metadata import PropertiesRecord
from tasks.engine.tensors.region import Region


class Part:
    """One rank's part of a tensor: boxes of the whole with their values.

    Args:
        shape: of the whole tensor.
        boxes: regions, each with its values.
    """

    __slots__ = ("boxes", "shape")

    def __init__(self, shape: tuple[int, ...], boxes: tuple[tuple[Region, StoredTensor], ...]) -> None:
        self.shape, self.boxes = shape, boxes

    def __setstate__(self, state: object) -> None:
        raise TypeError("a tensor's part with state of its own")


class OpenRecord(Record):
    """A record that leaves fields it does not know aside; for classes whose fields change between releases."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        super().__setstate__({name: value for name, value in state_fields(state) if name in self.__slots__})


class ShardMetadataRecord(OpenRecord):
    """Stand-in for `ShardMetadata`."""

    __slots__ = ("shard_offsets", "shard_sizes")
    shard_offsets: list[int]
    shard_sizes: list[int]


class ShardRecord(OpenRecord):
    """Stand-in for a ShardedTensor's `Shard`."""

    __slots__ = ("metadata", "tensor")
    metadata: object
    tensor: object


class ShardedTensorMetadataRecord(OpenRecord):
    """Stand-in for `ShardedTensorMetadata`."""

    __slots__ = ("size",)
    size: object


class MeshLayoutRecord(OpenRecord):
    """Stand-in for `_MeshLayout` and `_FlatLayout`: sizes of the mesh's axes."""

    __slots__ = ("axes", "shape")
    axes: "tuple[MeshLayoutRecord, ...]"
    shape: object


class MeshRecord(OpenRecord):
    """Stand-in for `DeviceMesh`; `mesh` is the tensor of ranks of releases before 2.9."""

    __slots__ = ("_coordinate_on_dim", "_layout", "mesh")
    _coordinate_on_dim: list[int] | tuple[int, ...]
    _layout: object
    mesh: object


class SpecRecord(OpenRecord):
    """Stand-in for `DTensorSpec`."""

    __slots__ = ("mesh", "placements")
    mesh: object
    placements: tuple[object, ...]


class Replicated(OpenRecord):
    """Stand-in for `Replicate`."""

    __slots__ = ()


class Sharded(OpenRecord):
    """Stand-in for `Shard`."""

    __slots__ = ("dim",)
    dim: int


class StridedSharded(OpenRecord):
    """Stand-in for `_StridedShard`."""

    __slots__ = ("dim", "split_factor")
    dim: int
    split_factor: int


class ShardOrderRecord(Opaque):
    """Stand-in for `ShardOrderEntry`: proves that the mesh axes cut a dim from left to right."""

    __slots__ = ()

    def __new__(cls, _dim: object, axes: tuple[int, ...]) -> Self:
        if list(axes) != sorted(axes):
            raise TypeError(f"mesh axes cut a dim in the order {axes}")
        return super().__new__(cls)


class ShardedTensorType(Opaque):
    """Stand-in for the class `ShardedTensor`, which its pickles only name."""

    __slots__ = ()


class DTensorType(Opaque):
    """Stand-in for the class `DTensor`, which its pickles only name."""

    __slots__ = ()


class RebuildWrapper(Opaque):
    """Stand-in for `_rebuild_wrapper_subclass`, which is only named."""

    __slots__ = ()


class GetAttribute(Opaque):
    """Stand-in for `getattr`, which ShardedTensors use to name one nested class; anything else is refused."""

    __slots__ = ()

    def __new__(cls, owner: object, name: object) -> type[Opaque]:  # type: ignore[misc]  # returns the class asked for
        if owner is not ShardedTensorType or name != "ProcessGroupState":
            raise TypeError(f"getattr for {name!r}")
        return Opaque


class RebuildFromType(Opaque):
    """Stand-in for `_rebuild_from_type_v2`: the rank's part."""

    __slots__ = ()

    def __new__(cls, func: object, kind: object, args: tuple[object, ...], state: object) -> Part | StoredTensor:  # type: ignore[misc]  # returns the part
        if func is RebuildWrapper and kind is DTensorType:
            fields = dict(state_fields(state))
            return _dtensor(_dims(args[2]), fields["_spec"], fields["_local_tensor"])
        if func is RebuildWrapper and kind is ShardedTensorType and isinstance(state, tuple):
            return _sharded_tensor(state[0], state[1])
        raise TypeError("tensor subclass of an unknown kind")


_SHARDED = "torch.distributed._shard.sharded_tensor"
PART_GLOBALS: Allowed = MappingProxyType(
    {
        **TENSOR_GLOBALS,
        ("__builtin__", "getattr"): GetAttribute,
        ("builtins", "getattr"): GetAttribute,
        ("torch._tensor", "_rebuild_from_type_v2"): RebuildFromType,
        ("torch._utils", "_rebuild_wrapper_subclass"): RebuildWrapper,
        ("torch.serialization", "_get_layout"): Opaque,
        (f"{_SHARDED}.api", "ShardedTensor"): ShardedTensorType,
        (f"{_SHARDED}.shard", "Shard"): ShardRecord,
        (f"{_SHARDED}.metadata", "ShardedTensorMetadata"): ShardedTensorMetadataRecord,
        (f"{_SHARDED}.metadata", "TensorProperties"): PropertiesRecord,
        (f"{_SHARDED}.metadata", "MEM_FORMAT_ENCODING"): Opaque,
        ("torch.distributed._shard.metadata", "ShardMetadata"): ShardMetadataRecord,
        ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"): Opaque,
        ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"): Opaque,
        ("torch.distributed.remote_device", "_remote_device"): Opaque,
        ("torch.distributed.tensor", "DTensor"): DTensorType,
        ("torch.distributed._tensor.api", "DTensor"): DTensorType,  # before torch 2.5
        ("torch.distributed.device_mesh", "DeviceMesh"): MeshRecord,
        ("torch.distributed._mesh_layout", "_MeshLayout"): MeshLayoutRecord,
        ("torch.distributed._mesh_layout", "_FlatLayout"): MeshLayoutRecord,
        **{
            (f"torch.distributed.{package}", name): stand_in
            for package in ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
            for name, stand_in in (("DTensorSpec", SpecRecord), ("TensorMeta", Opaque), ("ShardOrderEntry", ShardOrderRecord))
        },
        **{
            (f"torch.distributed.{package}.placement_types", name): stand_in
            for package in ("tensor", "_tensor")
            for name, stand_in in (("Replicate", Replicated), ("Shard", Sharded), ("_StridedShard", StridedSharded))
        },
    }
)


def is_part(value: object) -> TypeGuard[Part | StoredTensor]:
    """Return whether a described value is a tensor or one rank's part of one.

    Args:
        value: part of what a rank's file describes.

    Returns:
        Whether it is.
    """
    return isinstance(value, (Part, StoredTensor))


def cut(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return offset and length of one part as `torch.chunk` cuts: all of ceil(length / parts) but the last ones.

    Args:
        length: elements of the dim.
        parts: how many ranks share it.
        part: which of them.

    Returns:
        First index, elements; empty parts lie at the end.
    """
    size = -(-length // parts)
    start = min(part * size, length)
    return start, min(size, length - start)


def _dtensor(shape: tuple[int, ...], spec: object, local: object) -> Part | StoredTensor:
    if not isinstance(spec, SpecRecord) or not isinstance(spec.mesh, MeshRecord) or not isinstance(local, StoredTensor):
        raise TypeError("DTensor without spec, mesh or values")
    sizes, coordinates = _sizes(spec.mesh), _dims(tuple(spec.mesh._coordinate_on_dim))
    placements = tuple(spec.placements)
    if not len(sizes) == len(coordinates) == len(placements):
        raise TypeError(f"DTensor with {len(placements)} placements on a mesh of {len(sizes)} axes")
    offset, extent = [0] * len(shape), list(shape)
    for axis, dim in _order(placements, sizes):
        start, extent[dim] = cut(extent[dim], sizes[axis], coordinates[axis])
        offset[dim] += start
    if tuple(extent) != local.shape:
        raise TypeError(f"DTensor part of shape {local.shape} where its placements give {tuple(extent)}")
    return Part(shape, ((Region(tuple(offset), tuple(extent)), local),))


def _order(placements: tuple[object, ...], sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    # (mesh axis, tensor dim it cuts), in the order in which they cut.
    plain, strided = [], []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedSharded):
            strided.append((axis, placement.dim))
            later = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
            left = prod(size for other, size in later if isinstance(other, Sharded) and other.dim == placement.dim)
            if placement.split_factor != left:
                raise TypeError(f"strided placement with split factor {placement.split_factor}, not of FSDP over TP")
        elif isinstance(placement, Sharded):
            plain.append((axis, placement.dim))
        elif not isinstance(placement, Replicated):
            raise TypeError(f"placement {type(placement).__name__} is neither Shard nor Replicate")
    if len({dim for _, dim in strided}) != len(strided):
        raise TypeError("two strided placements of one dim")
    return plain + strided


def _sizes(mesh: MeshRecord) -> tuple[int, ...]:
    layout = getattr(mesh, "_layout", None)
    if isinstance(layout, MeshLayoutRecord):
        shapes = [axis.shape for axis in layout.axes] if hasattr(layout, "axes") else layout.shape
        if not isinstance(shapes, (list, tuple)):
            shapes = (shapes,)
        return _dims(tuple(prod(_dims(size)) if isinstance(size, tuple) else size for size in shapes))
    if isinstance(mesh.mesh, StoredTensor):
        return mesh.mesh.shape
    raise TypeError("mesh without sizes")


def _sharded_tensor(shards: object, metadata: object) -> Part:
    if not isinstance(shards, list) or not isinstance(metadata, ShardedTensorMetadataRecord):
        raise TypeError("ShardedTensor without shards or metadata")
    boxes = []
    for shard in shards:
        if not isinstance(shard, ShardRecord) or not isinstance(shard.metadata, ShardMetadataRecord):
            raise TypeError("ShardedTensor with a malformed shard")
        offset, extent = _dims(tuple(shard.metadata.shard_offsets)), _dims(tuple(shard.metadata.shard_sizes))
        if not isinstance(shard.tensor, StoredTensor) or shard.tensor.shape != extent:
            raise TypeError("ShardedTensor with a shard whose shape contradicts its metadata")
        boxes.append((Region(offset, extent), shard.tensor))
    return Part(_dims(metadata.size), tuple(boxes))


def _dims(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise TypeError(f"{value!r} is no shape")
    return value
