"""What data.pkl describes, against the tensors torch saved."""

import pickle
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError, HostilePickleError
from tasks.engine.containers.torch_dtypes import DTYPES, OTHER_DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor, collect_tensors, describe, is_tensor, locate_tensor
from tasks.engine.containers.torch_zip import Archive, open_archive
from validators.expectation import ITEMSIZE


def _archive(value: object, tmp_path: Path) -> Archive:
    path = tmp_path / "saved.pt"
    torch.save(value, path)
    return open_archive(str(path), 0, path.stat().st_size)


def _pickled(content: bytes, tmp_path: Path, **records: bytes) -> Archive:
    # An archive with a data.pkl of our own.
    path = tmp_path / "made.pt"
    with zipfile.ZipFile(path, "w") as made:
        for name, record in {"data.pkl": content, **records}.items():
            made.writestr(f"archive/{name}", record)
    return open_archive(str(path), 0, path.stat().st_size)


def _values(archive: Archive, tensor: StoredTensor) -> torch.Tensor:
    place = locate_tensor(archive, tensor, DTYPES[tensor.dtype])
    content = Path(archive.path).read_bytes()[place.start : place.start + place.nbytes]
    assert place.crc32 in (None, zlib.crc32(content))
    flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, tensor.dtype)) if content else torch.empty(0)
    return flat.reshape(tensor.shape) if place.strides is None else flat.as_strided(tensor.shape, place.strides)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_as_torch_saved_it(dtype, tmp_path):
    saved = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    archive = _archive(saved, tmp_path)
    tensor = describe(archive)
    assert isinstance(tensor, StoredTensor)
    assert (tensor.dtype, tensor.shape) == (dtype, (2, 3, 4))
    assert ITEMSIZE[DTYPES[dtype]] == saved.itemsize
    assert torch.equal(_values(archive, tensor).view(torch.uint8), saved.view(torch.uint8))


def test_the_dtype_tables_name_only_what_torch_has():
    assert [name for name in {*DTYPES, *OTHER_DTYPES} if not isinstance(getattr(torch, name), torch.dtype)] == []


@pytest.mark.parametrize(
    "saved",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12.0)[3:7],
        torch.arange(12.0)[::3],
        torch.tensor([1.0, 2.0]).expand(3, 2),
        torch.arange(5.0).reshape(1, 5).t(),
        torch.nn.Parameter(torch.arange(6.0)),
    ],
    ids=["0-d", "no elements", "transposed", "permuted", "slice", "stepped", "expanded", "column", "parameter"],
)
def test_views_are_placed_by_offset_and_strides(saved, tmp_path):
    archive = _archive(saved, tmp_path)
    tensor = describe(archive)
    assert isinstance(tensor, StoredTensor)
    assert torch.equal(_values(archive, tensor), saved.detach())


@pytest.mark.parametrize(
    ("saved", "is_plain"),
    [(torch.arange(12.0).reshape(3, 4), True), (torch.arange(5.0).reshape(1, 5).t(), True), (torch.arange(12.0).reshape(3, 4).t(), False)],
    ids=["C order", "C order but for a dim of one", "transposed"],
)
def test_only_values_in_c_order_have_no_strides(saved, is_plain, tmp_path):
    archive = _archive(saved, tmp_path)
    tensor = describe(archive)
    assert isinstance(tensor, StoredTensor)
    assert (locate_tensor(archive, tensor, "F32").strides is None) is is_plain


def test_a_part_of_a_storage_has_no_checksum_of_its_own(tmp_path):
    archive = _archive(torch.arange(12.0)[3:7], tmp_path)
    tensor = describe(archive)
    assert isinstance(tensor, StoredTensor)
    place = locate_tensor(archive, tensor, "F32")
    assert (place.crc32, place.is_whole) == (None, False)


def test_tied_tensors_are_two_names_of_one_storage(tmp_path):
    weight = torch.randn(4, 3)
    nest = collect_tensors(describe(_archive({"embed": weight, "head": weight}, tmp_path)), "a.bin", is_tensor)
    assert nest["embed",] == nest["head",]


def test_nested_dicts_and_lists_become_paths(tmp_path):
    saved = {"model": torch.nn.Linear(2, 2).state_dict(), "steps": [torch.zeros(1), {"a.b": torch.zeros(2)}], "lr": 0.1, "none": None}
    nest = collect_tensors(describe(_archive(saved, tmp_path)), "a.bin", is_tensor)
    assert list(nest) == [("model", "weight"), ("model", "bias"), ("steps", "0"), ("steps", "1", "a.b")]


def test_a_conjugated_tensor_is_refused(tmp_path):
    with pytest.raises(FormatError, match="conjugated"):
        describe(_archive(torch.zeros(2, dtype=torch.complex64).conj(), tmp_path))


def test_numpy_in_a_file_is_refused_by_name(tmp_path):
    with pytest.raises(HostilePickleError, match="numpy"):
        describe(_archive({"a": torch.zeros(1).numpy()}, tmp_path))


def test_big_endian_values_are_refused(tmp_path):
    with pytest.raises(FormatError, match="big-endian"):
        describe(_pickled(pickle.dumps(1, protocol=2), tmp_path, byteorder=b"big"))


def test_a_damaged_data_pkl_is_found_by_its_checksum(tmp_path):
    archive = _archive(torch.arange(12.0), tmp_path)
    path = Path(archive.path)
    path.write_bytes(path.read_bytes().replace(b"cpu", b"gpu"))
    archive = open_archive(archive.path, 0, archive.nbytes)
    with pytest.raises(FormatError, match=r"data\.pkl has CRC32"):
        describe(archive)


def _tensor(numel: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    dims = [b"".join(b"I%d\n" % n for n in part) for part in (shape, strides)]
    return (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI%d\ntQI%d\n(%st(%st\x89NtR.") % (
        numel,
        offset,
        *dims,
    )


def test_the_hand_made_tensor_is_sound(tmp_path):
    archive = _pickled(_tensor(6, 0, (2, 3), (3, 1)), tmp_path, **{"data/0": b"\0" * 24})
    tensor = describe(archive)
    assert isinstance(tensor, StoredTensor)
    assert locate_tensor(archive, tensor, "F32").nbytes == 24


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_tensor(6, -1, (2, 3), (3, 1)), "negative"),
        (_tensor(6, 0, (2, -3), (3, 1)), "negative"),
        (_tensor(6, 0, (2, 3), (3, -1)), "negative"),
        (_tensor(6, 0, (2, 3), (1,)), "differ in length"),
        (_tensor(-6, 0, (2, 3), (3, 1)), "storage without"),
    ],
)
def test_an_impossible_tensor_is_refused(content, says, tmp_path):
    with pytest.raises(FormatError, match=says):
        describe(_pickled(content, tmp_path, **{"data/0": b"\0" * 24}))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_tensor(6, 1, (2, 3), (3, 1)), "leaves its storage"),
        (_tensor(6, 0, (2, 3), (4, 1)), "leaves its storage"),
        (_tensor(7, 0, (2, 3), (3, 1)), "has 24 bytes, its storage 28"),
    ],
)
def test_a_tensor_that_does_not_fit_its_record_is_refused(content, says, tmp_path):
    archive = _pickled(content, tmp_path, **{"data/0": b"\0" * 24})
    tensor = describe(archive)
    assert isinstance(tensor, StoredTensor)
    with pytest.raises(FormatError, match=says):
        locate_tensor(archive, tensor, "F32")


def test_a_dict_that_holds_itself_is_refused():
    nest: dict[str, object] = {}
    nest["a"] = {"b": nest}
    with pytest.raises(FormatError, match="holds itself"):
        collect_tensors(nest, "a.bin", is_tensor)


def test_lists_that_hold_each_other_many_times_over_are_refused(monkeypatch):
    monkeypatch.setattr("tasks.engine.containers.torch_pickle.MAX_VALUES", 10_000)
    nest: list[object] = []
    for _ in range(30):
        nest = [nest, nest]
    with pytest.raises(FormatError, match="more than 10000 values"):
        collect_tensors(nest, "a.bin", is_tensor)


def test_two_tensors_of_one_path_are_refused(tmp_path):
    nest = describe(_archive({1: torch.zeros(1), "1": torch.zeros(2)}, tmp_path))
    with pytest.raises(FormatError, match="two tensors are named 1"):
        collect_tensors(nest, "a.bin", is_tensor)


def test_an_object_item_is_refused_by_the_global_it_asks_for(tmp_path):
    with pytest.raises(HostilePickleError, match=r"_codecs\.encode"):
        describe(_archive(b"bytes", tmp_path))
