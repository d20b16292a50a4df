"""The boxes that DTensor placements stand for, against torch's own arithmetic, and the placements that are refused."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tasks.engine.containers.pickles import Opaque
from tasks.engine.containers.torch_pickle import StorageRef, StoredTensor
from tasks.engine.formats.distributed_pickles import (
    PART_GLOBALS,
    DTensorType,
    MeshLayoutRecord,
    MeshRecord,
    Part,
    RebuildFromType,
    RebuildWrapper,
    Replicated,
    Sharded,
    ShardedTensorType,
    ShardOrderRecord,
    SpecRecord,
    StridedSharded,
)


def _record(kind: type, **fields: object) -> Any:
    made = kind()
    made.__setstate__(fields)
    return made


def _placement(placement: object) -> object:
    if isinstance(placement, _StridedShard):
        return _record(StridedSharded, dim=placement.dim, split_factor=placement.split_factor)
    return _record(Sharded, dim=placement.dim) if isinstance(placement, Shard) else _record(Replicated)


def _part(shape: tuple[int, ...], local: tuple[int, ...], mesh: object, placements: list[object]) -> Part | StoredTensor:
    values = StoredTensor("float32", StorageRef("0", "float32", prod(local)), 0, local, (1,) * len(local))
    spec = _record(SpecRecord, mesh=mesh, placements=tuple(placements))
    return RebuildFromType(RebuildWrapper, DTensorType, (None, None, shape), (None, {"_spec": spec, "_local_tensor": values}))


def _mesh(sizes: tuple[int, ...], coordinates: tuple[int, ...]) -> MeshRecord:
    axes = tuple(_record(MeshLayoutRecord, shape=(size,)) for size in sizes)
    return _record(MeshRecord, _layout=_record(MeshLayoutRecord, axes=axes), _coordinate_on_dim=coordinates)


def _check(shape: tuple[int, ...], sizes: tuple[int, ...], coordinates: tuple[int, ...], placements: list[Any]) -> None:
    local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinates), placements)
    part = _part(shape, tuple(local), _mesh(sizes, coordinates), [_placement(placement) for placement in placements])
    assert isinstance(part, Part)
    ((region, _),) = part.boxes
    assert region.shape == tuple(local)
    if region.numel:
        assert region.offset == tuple(offset)


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(st.data(), MESHES, st.lists(st.integers(0, 23), min_size=1, max_size=3).map(tuple))
def test_uneven_shards_and_replicas_on_any_mesh_lie_where_torch_says(data, sizes, shape):
    dims = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [data.draw(st.sampled_from(dims)) for _ in sizes]
    _check(shape, sizes, tuple(data.draw(st.integers(0, size - 1)) for size in sizes), placements)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7))
def test_strided_shards_of_fsdp_over_tp_lie_where_torch_says(data, fsdp, tp, rows, columns):
    coordinates = (data.draw(st.integers(0, fsdp - 1)), data.draw(st.integers(0, tp - 1)))
    _check((rows * fsdp * tp, columns), (fsdp, tp), coordinates, [_StridedShard(0, split_factor=tp), Shard(0)])


def test_a_mesh_of_releases_before_2_9_knows_its_sizes_by_its_ranks():
    ranks = StoredTensor("int64", StorageRef("1", "int64", 4), 0, (2, 2), (2, 1))
    mesh = _record(MeshRecord, mesh=ranks, _coordinate_on_dim=[1, 0])
    part = _part((8, 3), (4, 3), mesh, [_record(Sharded, dim=0), _record(Replicated)])
    assert isinstance(part, Part)
    assert part.boxes[0][0].offset == (4, 0)


@pytest.mark.parametrize(
    ("sizes", "placements", "local", "says"),
    [
        ((2,), [Opaque()], (8, 3), "neither Shard nor Replicate"),
        ((2,), [_record(Sharded, dim=0)], (8, 3), "placements give"),
        ((2, 2), [_record(Sharded, dim=0)], (4, 3), "1 placements on a mesh of 2 axes"),
        ((2, 2), [_record(StridedSharded, dim=0, split_factor=2), _record(Replicated)], (4, 3), "not of FSDP over TP"),
        (
            (2, 2, 2),
            [
                _record(StridedSharded, dim=0, split_factor=2),
                _record(StridedSharded, dim=0, split_factor=2),
                _record(Sharded, dim=0),
            ],
            (1, 3),
            "two strided",
        ),
    ],
    ids=["pending sum", "part of another shape", "fewer placements than axes", "strided over no TP", "two strided"],
)
def test_placements_that_stand_for_no_box_are_refused(sizes, placements, local, says):
    with pytest.raises(TypeError, match=says):
        _part((8, 3), local, _mesh(sizes, (0,) * len(sizes)), placements)


def test_mesh_axes_that_cut_in_another_order_are_refused():
    assert isinstance(ShardOrderRecord(0, (0, 1)), Opaque)
    with pytest.raises(TypeError, match=r"order \(1, 0\)"):
        ShardOrderRecord(0, (1, 0))


@pytest.mark.parametrize("kind", [ShardedTensorType, DTensorType, Opaque])
def test_a_tensor_subclass_without_its_own_state_is_refused(kind):
    with pytest.raises((TypeError, KeyError)):
        RebuildFromType(RebuildWrapper, kind, (None, None, (2,)), {})


def test_pending_sums_are_not_in_the_list():
    assert [name for _, name in PART_GLOBALS if "Partial" in name] == []


@given(st.integers(1, 6), st.integers(1, 20))
def test_the_parts_of_one_dim_are_those_of_torch_chunk(parts, length):
    assume(length >= parts)
    chunks = torch.arange(length).chunk(parts)
    for rank, chunk in enumerate(chunks):
        part = _part((length,), tuple(chunk.shape), _mesh((parts,), (rank,)), [_record(Sharded, dim=0)])
        assert isinstance(part, Part)
        assert part.boxes[0][0].offset == (int(chunk[0]),)
