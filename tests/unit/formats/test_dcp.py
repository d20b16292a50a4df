"""DCP folders that are incomplete, damaged or odd: one test per way. The sound ones are in tests/contract."""

import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError, HostilePickleError
from tasks.engine.formats.dcp import DcpReader
from tasks.engine.formats.reader import Source
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.dcp import save_alone
from tests.contract.assembled import assemble, read_values, same_bytes

WEIGHT = torch.arange(12, dtype=torch.float32).reshape(4, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_alone({"model": {"a.weight": WEIGHT, "b": torch.tensor(1.5)}, "optim": {"lr": 0.1}}, tmp_path / "save")
    return tmp_path / "save"


def _catalog(folder: Path, *also: Path):
    return DcpReader(Source(folder, also)).catalog()


def _refusal(folder: Path) -> str:
    assert DcpReader.probe(folder).matches
    with pytest.raises(FormatError) as refused:
        _catalog(folder)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def _sharded(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "fsdp2" / "ckpt", tmp_path / "ckpt"))


def test_a_save_without_metadata_is_incomplete_and_its_files_are_listed(folder):
    (folder / ".metadata").unlink()
    assert "incomplete save: .metadata is missing, which is written last; there are __0_0.distcp" in _refusal(folder)


def test_a_save_that_has_only_the_temporary_metadata_is_incomplete(folder):
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    assert "incomplete save: .metadata is missing" in _refusal(folder)


def test_a_save_over_an_older_one_that_was_interrupted_is_refused(folder):
    shutil.copy(folder / ".metadata", folder / ".metadata.tmp")
    assert "a later save into this folder was interrupted" in _refusal(folder)


@pytest.mark.parametrize("keep", [0, 1, 100, 1000])
def test_a_metadata_cut_short_is_an_incomplete_save(folder, keep):
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[:keep])
    assert ".metadata: incomplete save: " in _refusal(folder)


def test_ranks_without_a_file_are_named_where_the_metadata_is_lost(written, tmp_path):
    folder = _sharded(written, tmp_path)
    (folder / ".metadata").write_bytes(b"\x80")
    (folder / "__1_0.distcp").unlink()
    assert "beside it are __0_0.distcp, __2_0.distcp, __3_0.distcp and none of rank 1" in _refusal(folder)
    (folder / ".metadata").unlink()
    assert "__3_0.distcp and none of rank 1" in _refusal(folder)


def test_a_missing_ranks_file_is_named_with_its_rank(written, tmp_path):
    folder = _sharded(written, tmp_path)
    (folder / "__2_0.distcp").unlink()
    assert "1 of 4 files are missing: __2_0.distcp; rank 2 lost" in _refusal(folder)


def test_all_missing_and_short_files_are_named_together(written, tmp_path):
    folder = _sharded(written, tmp_path)
    (folder / "__0_0.distcp").unlink()
    (folder / "__2_0.distcp").unlink()
    os.truncate(folder / "__3_0.distcp", 100)
    told = _refusal(folder)
    assert "2 of 4 files are missing: __0_0.distcp, __2_0.distcp; ranks 0, 2 lost" in told
    assert "cut short: __3_0.distcp has 100 bytes of" in told


def test_a_file_that_lacks_its_last_byte_is_cut_short(folder):
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    assert "cut short: __0_0.distcp" in _refusal(folder)


def test_a_file_without_permission_is_refused_by_name(folder, monkeypatch):
    real = os.open

    def refuse(path, *rest, **more):
        if str(path).endswith(".distcp"):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert "__0_0.distcp: cannot be read: Permission denied" in _refusal(folder)


def test_a_folder_in_place_of_a_file_is_refused(folder):
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").mkdir()
    assert "__0_0.distcp: is not a file" in _refusal(folder)


def test_a_rank_local_save_is_refused_with_the_reason(folder):
    (folder / ".metadata").rename(folder / "__0.metadata")
    assert "rank-local save" in _refusal(folder)


def test_a_hostile_metadata_is_refused_by_name(folder):
    (folder / ".metadata").write_bytes(b"cposix\nsystem\n(Vtouch ran\ntR.")
    with pytest.raises(HostilePickleError, match=r"posix\.system"):
        open_checkpoint(folder).catalog()


def test_megatrons_format_is_not_taken_for_it(folder):
    (folder / "common.pt").touch()
    assert open_checkpoint(folder).name == "megatron_dist"


def test_another_tools_metadata_json_is_no_hindrance(folder):
    (folder / "metadata.json").write_text('{"run": "mine"}')
    assert isinstance(open_checkpoint(folder), DcpReader)


def test_files_of_an_earlier_save_are_noted(folder):
    (folder / "__7_0.distcp").touch()
    assert _catalog(folder).notes == ("__7_0.distcp of an earlier save left aside: .metadata does not name them",)


def test_a_folder_of_optimizer_state_alone_is_refused(tmp_path):
    save_alone({"optimizer": {"state": {"w": torch.zeros(2)}}}, tmp_path / "optimizer_0")
    assert "holds no model, only training state: optimizer" in _refusal(tmp_path / "optimizer_0")


def test_two_models_in_one_folder_are_refused_by_name(tmp_path):
    for number in (0, 1):
        save_alone({"model": {"w": WEIGHT}}, tmp_path / f"pytorch_model_fsdp_{number}")
    assert "holds 2 models: pytorch_model_fsdp_0/, pytorch_model_fsdp_1/" in _refusal(tmp_path)


def test_the_inner_folder_of_an_accelerate_save_is_read_too(written):
    outer = written / "accelerate" / "ckpt"
    inner = open_checkpoint(outer / "pytorch_model_fsdp_0").catalog()
    assert inner.tensors == open_checkpoint(outer).catalog().tensors
    assert (inner.state, inner.state_tensors) == ((), {})


def test_what_lies_beside_an_inner_model_folder_is_listed_as_state(written):
    state = open_checkpoint(written / "accelerate" / "ckpt").catalog().state
    assert [item.fqn for item in state if not item.fqn.startswith("optimizer.param_groups.0.")] == ["scheduler.bin"]


def test_training_state_is_listed_apart_from_the_model(written):
    catalog = open_checkpoint(written / "fsdp2" / "ckpt").catalog()
    moment = catalog.state_tensors["exp_avg/up.weight"]
    assert (moment.shape, moment.dtype) == ((34, 16), "BF16")
    assert moment.first >= max(tensor.last for tensor in catalog.tensors.values())
    state = {item.fqn: item for item in catalog.state}
    assert state["train_state.step"].kind == "object"
    assert not {*state, *catalog.state_tensors} & set(catalog.tensors)


def test_names_that_become_one_without_wrappers_are_refused(tmp_path):
    save_alone({"model": {"_orig_mod.a": WEIGHT, "a": WEIGHT + 1}}, tmp_path / "save")
    assert "are both a without wrapper prefixes" in _refusal(tmp_path / "save")


def test_a_dtype_no_release_can_hold_is_refused_in_the_model_and_listed_in_the_state(tmp_path):
    save_alone({"model": {"a": WEIGHT}, "extra": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "state")
    assert _catalog(tmp_path / "state").state[0].dtype == "complex64"
    save_alone({"model": {"a": torch.zeros(2, dtype=torch.complex64)}}, tmp_path / "model")
    assert "model.a has dtype complex64" in _refusal(tmp_path / "model")


def test_a_chunk_that_several_ranks_saved_is_read_once_with_a_note(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    item = metadata.state_dict_metadata["model.a.weight"]
    item.chunks = item.chunks * 2
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    catalog = _catalog(folder)
    assert len(catalog.fragments("a.weight")) == 1
    assert catalog.notes == ("a.weight: the chunk at (0, 0) was saved by several ranks; the one the metadata points to is read",)


def test_a_tensor_without_elements_has_no_fragment(tmp_path):
    save_alone({"model": {"empty": torch.zeros(0, 4), "a": WEIGHT}}, tmp_path / "save")
    catalog = _catalog(tmp_path / "save")
    assert catalog.tensors["empty"].shape == (0, 4)
    assert catalog.fragments("empty") == ()
    catalog.check_coverage("empty", (0, 4))


def test_objects_of_the_save_are_never_unpickled(tmp_path):
    class Marks:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    save_alone({"model": {"a": WEIGHT}, "extra": Marks()}, tmp_path / "save")
    reader = DcpReader(Source(tmp_path / "save"))
    assert same_bytes(assemble(reader, "a", (4, 3)), WEIGHT)
    assert not (tmp_path / "ran").exists()


class TestNodeLocalDisks:
    @pytest.fixture
    def nodes(self, written: Path, tmp_path: Path) -> tuple[Path, Path]:
        first, second = _sharded(written, tmp_path), tmp_path / "node1"
        second.mkdir()
        for rank in (2, 3):
            shutil.move(first / f"__{rank}_0.distcp", second)
        return first, second

    def test_one_node_alone_is_incomplete(self, nodes):
        assert "ranks 2, 3 lost" in _refusal(nodes[0])

    def test_both_nodes_together_are_whole(self, nodes, written):
        reader = open_checkpoint(nodes[0], also=[nodes[1]])
        whole = open_checkpoint(written / "fsdp2" / "ckpt")
        for fqn, tensor in whole.catalog().tensors.items():
            assert same_bytes(assemble(reader, fqn, tensor.shape), assemble(whole, fqn, tensor.shape))

    def test_the_order_of_the_nodes_does_not_matter(self, nodes):
        reader = open_checkpoint(nodes[1], also=[nodes[0]])
        assert reader.catalog().tensors == open_checkpoint(nodes[0], also=[nodes[1]]).catalog().tensors

    def test_metadata_of_another_save_on_another_node_is_refused(self, nodes, tmp_path):
        save_alone({"model": {"a": WEIGHT}}, tmp_path / "other")
        shutil.copy(tmp_path / "other" / ".metadata", nodes[1])
        with pytest.raises(FormatError, match="of another save"):
            _catalog(*nodes)


class TestItems:
    def _damaged(self, folder: Path, tmp_path: Path, value: object) -> DcpReader:
        # The folder's data file exchanged for that of another save, whose items have the same lengths.
        reader = DcpReader(Source(folder))
        catalog = reader.catalog()
        save_alone({"model": {"a.weight": value, "b": torch.tensor(1.5)}, "optim": {"lr": 0.1}}, tmp_path / "other")
        shutil.copy(tmp_path / "other" / "__0_0.distcp", folder / "__0_0.distcp")
        with pytest.raises(FormatError) as refused:
            reader.payload(catalog.fragments("a.weight")[0])
        self.told = str(refused.value)
        return reader

    def test_an_item_of_another_shape_is_refused(self, folder, tmp_path):
        self._damaged(folder, tmp_path, WEIGHT.reshape(3, 4))
        assert "a.weight: the metadata says F32 (4, 3), the item F32 (3, 4); parts of two saves?" in self.told

    def test_an_item_of_another_dtype_is_refused(self, folder, tmp_path):
        self._damaged(folder, tmp_path, WEIGHT.to(torch.int32))
        assert "the item I32 (4, 3)" in self.told

    def test_an_item_of_another_length_is_refused(self, folder, tmp_path):
        self._damaged(folder, tmp_path, torch.zeros(40, 3))
        assert "archive" in self.told

    def test_a_flipped_bit_disagrees_with_the_recorded_checksum(self, folder):
        path = folder / "__0_0.distcp"
        content = bytearray(path.read_bytes())
        content[content.index(WEIGHT.numpy().tobytes()) + 5] ^= 4
        path.write_bytes(content)
        reader = DcpReader(Source(folder))
        payload = reader.payload(reader.catalog().fragments("a.weight")[0])
        values = path.read_bytes()[payload.start : payload.start + payload.nbytes]
        assert payload.crc32 == zlib.crc32(WEIGHT.numpy().tobytes()) != zlib.crc32(values)

    def test_a_writer_that_recorded_no_checksums_gives_none(self, tmp_path):
        torch.serialization.set_crc32_options(False)
        try:
            save_alone({"model": {"a": WEIGHT}}, tmp_path / "save")
        finally:
            torch.serialization.set_crc32_options(True)
        reader = DcpReader(Source(tmp_path / "save"))
        fragment = reader.catalog().fragments("a")[0]
        assert reader.payload(fragment).crc32 is None
        assert same_bytes(read_values(reader, fragment), WEIGHT)

    def test_values_stored_transposed_come_with_their_strides(self, tmp_path):
        save_alone({"model": {"a": WEIGHT.t()}}, tmp_path / "save")
        reader = DcpReader(Source(tmp_path / "save"))
        fragment = reader.catalog().fragments("a")[0]
        assert reader.payload(fragment).strides == (1, 3)
        assert same_bytes(read_values(reader, fragment), WEIGHT.t())
