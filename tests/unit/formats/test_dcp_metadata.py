""".metadata as torch writes it, of this release and older ones, and one test per way it can be wrong."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from reports.errors import FormatError, HostilePickleError
from tasks.engine.formats.dcp_metadata import DcpMetadata, SavedObject, SavedTensor

KEY = "model.a.weight"


def _metadata() -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([2, 3])) for start in (2, 0)]
    return Metadata(
        {KEY: TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4, 3]), chunks), "lr": BytesStorageMetadata()},
        {KEY: ("model", "a.weight"), "lr": ("optim", "param_groups", 0, "lr")},
        {
            MetadataIndex(KEY, torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex(KEY, torch.Size([2, 0]), 1): _StorageInfo("__1_0.distcp", 7, 200),
            MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 100, 50),
        },
        StorageMeta(checkpoint_id=Path("/somewhere/else"), save_id="x"),
    )


def _read(metadata: object, protocol: int = pickle.DEFAULT_PROTOCOL) -> DcpMetadata:
    return DcpMetadata(pickle.dumps(metadata, protocol=protocol), "a/.metadata")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_items_places_and_files_are_read(protocol):
    read = _read(_metadata(), protocol)
    tensor, thing = read.items()
    assert tensor == SavedTensor(KEY, ("model", "a.weight"), "bfloat16", (4, 3), (((2, 0), (2, 3)), ((0, 0), (2, 3))))
    assert thing == SavedObject("lr", ("optim", "param_groups", "0", "lr"))
    assert (read.place(KEY, (2, 0)).path, read.place(KEY, (2, 0)).start, read.place(KEY, (2, 0)).nbytes) == ("__1_0.distcp", 7, 200)
    assert read.place("lr", None).start == 100
    assert read.needed_nbytes() == {"__0_0.distcp": 150, "__1_0.distcp": 207}


def test_metadata_of_releases_without_planner_and_version_is_read():
    metadata = _metadata()
    for field in ("planner_data", "storage_meta", "version"):
        vars(metadata).pop(field, None)
    assert [item.path for item in _read(metadata).items()] == [(KEY,), ("lr",)]


def test_tensor_properties_of_releases_before_2_3_are_read():
    metadata = _metadata()
    metadata.state_dict_metadata[KEY].properties = old_metadata.TensorProperties(dtype=torch.float16)
    item = next(iter(_read(metadata).items()))
    assert isinstance(item, SavedTensor)
    assert item.dtype == "float16"


def _set_place(metadata: Metadata, **fields: object) -> None:
    vars(metadata.storage_data[MetadataIndex(KEY, torch.Size([2, 0]))]).update(fields)


def _chunk(metadata: Metadata) -> ChunkStorageMetadata:
    return metadata.state_dict_metadata[KEY].chunks[0]


WAYS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "file above the folder": (lambda m: _set_place(m, relative_path="../other/__1_0.distcp"), "outside the checkpoint"),
    "absolute file": (lambda m: _set_place(m, relative_path="/etc/passwd"), "outside the checkpoint"),
    "absolute file of Windows": (lambda m: _set_place(m, relative_path="C:\\x.distcp"), "outside the checkpoint"),
    "file above by backslashes": (lambda m: _set_place(m, relative_path="..\\x.distcp"), "outside the checkpoint"),
    "empty file name": (lambda m: _set_place(m, relative_path=""), "outside the checkpoint"),
    "file name that is no text": (lambda m: _set_place(m, relative_path=7), "place is malformed"),
    "negative offset": (lambda m: _set_place(m, offset=-1), "lies at -1"),
    "length that is no number": (lambda m: _set_place(m, length="9"), "with length '9'"),
    "stream transform": (lambda m: _set_place(m, transform_descriptors=["zstd"]), "stream transform"),
    "unknown field of a place": (lambda m: _set_place(m, compressed=True), "storage has fields compressed"),
    "unknown field of a chunk": (lambda m: vars(_chunk(m)).update(order=1), "chunk has fields order"),
    "chunk without sizes": (lambda m: vars(_chunk(m)).pop("sizes"), "sizes"),
    "negative chunk": (lambda m: setattr(_chunk(m), "sizes", (2, -1)), "malformed chunk"),
    "chunk of other dims": (lambda m: setattr(_chunk(m), "offsets", torch.Size([0])), r"chunk \(0,\) of shape"),
    "tensor without chunks": (lambda m: vars(m.state_dict_metadata[KEY]).pop("chunks"), "without dtype, shape or chunks"),
    "item of another kind": (lambda m: m.state_dict_metadata.update({KEY: "text"}), "neither a tensor nor an object"),
    "item without a name": (lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()}), "name is 7"),
    "path that is no path": (lambda m: m.planner_data.update({KEY: "model.a"}), "path in the state dict is malformed"),
    "no places": (lambda m: setattr(m, "storage_data", None), "without items or without their places"),
    "no items": (lambda m: setattr(m, "state_dict_metadata", None), "without items"),
    "a place that is none": (lambda m: m.storage_data.update({MetadataIndex("x"): "text"}), "place is malformed"),
    "unknown field of the whole": (lambda m: setattr(m, "surprise", 1), "surprise"),
}


@pytest.mark.parametrize(("damage", "says"), WAYS.values(), ids=WAYS)
def test_malformed_metadata_is_refused_saying_how(damage, says):
    metadata = _metadata()
    damage(metadata)
    with pytest.raises(FormatError, match=says) as refused:
        list(_read(metadata).items())
    assert "a/.metadata" in str(refused.value)


def test_a_chunk_in_two_places_is_refused():
    content = pickle.dumps(_metadata(), protocol=2)
    two = _metadata()
    two.storage_data[MetadataIndex(KEY, torch.Size([3, 0]))] = _StorageInfo("__1_0.distcp", 300, 200)
    moved = pickle.dumps(two, protocol=2)
    assert moved.count(b"K\x03K\x00\x86") == content.count(b"K\x03K\x00\x86") + 1
    with pytest.raises(FormatError, match="lies in two places"):
        DcpMetadata(moved.replace(b"K\x03K\x00\x86", b"K\x02K\x00\x86"), "a/.metadata")


def test_a_chunk_without_a_place_is_refused_by_name():
    metadata = _metadata()
    del metadata.storage_data[MetadataIndex(KEY, torch.Size([2, 0]))]
    with pytest.raises(FormatError, match=rf"{KEY}: the metadata does not say where the chunk at \(2, 0\) lies"):
        _read(metadata).place(KEY, (2, 0))


def test_a_pickle_of_something_else_is_refused():
    with pytest.raises(FormatError, match="pickle of a dict"):
        _read({"a": 1})


def test_a_cut_metadata_is_an_incomplete_save():
    content = pickle.dumps(_metadata())
    for length in range(0, len(content), 97):
        with pytest.raises(FormatError, match=r"incomplete save: .* cut short"):
            DcpMetadata(content[:length], "a/.metadata")


def test_a_metadata_that_would_run_code_is_refused_by_name():
    class Hostile:
        def __reduce__(self):
            return eval, ("1/0",)

    metadata = _metadata()
    metadata.planner_data["x"] = Hostile()
    with pytest.raises(HostilePickleError, match=r"builtins\.eval"):
        _read(metadata)
