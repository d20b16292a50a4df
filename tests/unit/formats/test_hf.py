"""Hugging Face folders that are incomplete, contradictory or odd: one test per way. The sound ones are in tests/contract."""

import json
import os
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reports.errors import FormatError, HostilePickleError
from tasks.engine.formats.hf import HuggingFaceReader
from tasks.engine.formats.reader import Source
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import execute_file, verify_shared
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.hf import WEIGHTS, write_file, write_index, write_shards
from tests.contract.assembled import assemble, same_bytes

SUFFIXES = [".safetensors", ".bin"]
FIRST = "model.embed_tokens.weight"


def _refusal(folder: Path) -> str:
    assert HuggingFaceReader.probe(folder).matches
    with pytest.raises(FormatError) as refused:
        HuggingFaceReader(Source(folder)).catalog()
    assert str(folder) in str(refused.value)
    return str(refused.value)


def _shard(folder: Path, number: int) -> Path:
    return next(path for path in folder.iterdir() if f"-0000{number}-of-" in path.name)


@pytest.mark.parametrize("suffix", SUFFIXES)
class TestIndexAndShards:
    def test_a_missing_shard_is_named(self, suffix, tmp_path):
        write_shards(tmp_path, suffix=suffix)
        name = _shard(tmp_path, 2).name
        _shard(tmp_path, 2).unlink()
        assert f"1 of 2 files are missing: {name}" in _refusal(tmp_path)

    def test_a_tensor_the_shard_lacks_is_named(self, suffix, tmp_path):
        weight_map = write_shards(tmp_path, suffix=suffix)
        write_index(tmp_path, weight_map | {"lm_head.weight": _shard(tmp_path, 1).name}, suffix=suffix)
        assert "the shards lack: lm_head.weight in" in _refusal(tmp_path)

    def test_a_tensor_the_index_does_not_name_is_named(self, suffix, tmp_path):
        weight_map = write_shards(tmp_path, suffix=suffix)
        write_index(tmp_path, {name: file for name, file in weight_map.items() if name != FIRST}, suffix=suffix)
        assert f"the index does not name there: {FIRST} in" in _refusal(tmp_path)

    def test_tensors_in_each_others_shards_are_named_both_ways(self, suffix, tmp_path):
        weight_map = write_shards(tmp_path, suffix=suffix)
        other = next(file for file in weight_map.values() if file != weight_map[FIRST])
        write_index(tmp_path, weight_map | {FIRST: other}, suffix=suffix)
        told = _refusal(tmp_path)
        assert f"the shards lack: {FIRST} in {other}" in told
        assert f"does not name there: {FIRST} in {weight_map[FIRST]}" in told

    def test_stray_shards_are_named(self, suffix, tmp_path):
        write_shards(tmp_path, suffix=suffix)
        stray = _shard(tmp_path, 1).name.replace("of-00002", "of-00009")
        write_file(tmp_path / stray, WEIGHTS)
        assert "stray weights beside" in _refusal(tmp_path)
        assert stray in _refusal(tmp_path)

    def test_shards_without_an_index_are_refused(self, suffix, tmp_path):
        write_shards(tmp_path, suffix=suffix)
        next(tmp_path.glob("*.index.json")).unlink()
        assert "index is missing; there are" in _refusal(tmp_path)

    def test_a_shard_cut_short_is_named(self, suffix, tmp_path):
        write_shards(tmp_path, suffix=suffix)
        path = _shard(tmp_path, 2)
        os.truncate(path, path.stat().st_size - 1)
        assert path.name in _refusal(tmp_path)

    @pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/model.bin"])
    def test_an_index_that_leaves_the_folder_is_refused(self, suffix, outside, tmp_path):
        weight_map = write_shards(tmp_path, suffix=suffix)
        write_index(tmp_path, weight_map | {FIRST: outside}, suffix=suffix)
        assert "no weight file of this folder" in _refusal(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000], ids=range(5))
    def test_a_malformed_index_is_refused(self, suffix, content, tmp_path):
        write_shards(tmp_path, suffix=suffix)
        next(tmp_path.glob("*.index.json")).write_text(content)
        assert "index.json" in _refusal(tmp_path)

    def test_file_names_of_another_pattern_are_read_as_the_index_says(self, suffix, tmp_path):
        stem = "model" if suffix == ".safetensors" else "pytorch_model"
        names = [f"{stem}{suffix}-00001-of-00002{suffix}", f"weights/part-two{suffix}"]
        (tmp_path / "weights").mkdir()
        halves = [dict(list(WEIGHTS.items())[:2]), dict(list(WEIGHTS.items())[2:])]
        for name, half in zip(names, halves, strict=True):
            write_file(tmp_path / name, half)
        write_index(tmp_path, {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}, suffix=suffix)
        reader = HuggingFaceReader(Source(tmp_path))
        for fqn, tensor in WEIGHTS.items():
            assert same_bytes(assemble(reader, fqn, tuple(tensor.shape)), tensor)

    def test_shards_on_another_nodes_disk_are_found(self, suffix, tmp_path):
        write_shards(tmp_path / "one", suffix=suffix)
        (tmp_path / "two").mkdir()
        path = _shard(tmp_path / "one", 2)
        path.rename(tmp_path / "two" / path.name)
        reader = open_checkpoint(tmp_path / "one", also=[tmp_path / "two"])
        for fqn, tensor in WEIGHTS.items():
            assert same_bytes(assemble(reader, fqn, tuple(tensor.shape)), tensor)


def test_safetensors_are_preferred_to_bin(tmp_path):
    write_file(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    write_file(tmp_path / "pytorch_model.bin", {"a": torch.zeros(2)})
    reader = HuggingFaceReader(Source(tmp_path))
    assert same_bytes(assemble(reader, "a", (2,)), torch.ones(2))


def test_a_single_file_beside_an_index_is_stray(tmp_path):
    write_shards(tmp_path)
    write_file(tmp_path / "model.safetensors", WEIGHTS)
    assert "stray weights beside model.safetensors.index.json: model.safetensors" in _refusal(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path):
    write_file(tmp_path / "model.safetensors", {})
    assert "holds no tensor" in _refusal(tmp_path)


class TestTrainerFolder:
    def test_its_own_files_are_listed_and_never_opened(self, tmp_path):
        folder = tmp_path / "checkpoint-30"
        folder.mkdir()
        write_file(folder / "model.safetensors", WEIGHTS)
        for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "trainer_state.json"):
            (folder / name).write_bytes(b"cos\nsystem\n.")
        (folder / "config.json").write_text("{}")
        catalog = HuggingFaceReader(Source(folder)).catalog()
        assert {item.fqn for item in catalog.state} == {
            "optimizer.pt",
            "scheduler.pt",
            "training_args.bin",
            "rng_state_0.pth",
            "trainer_state.json",
        }
        assert (set(catalog.tensors), catalog.step) == (set(WEIGHTS), 30)

    def test_the_runs_root_opens_the_newest_one(self, tmp_path):
        for step in (9, 30, 200):
            (tmp_path / f"checkpoint-{step}").mkdir()
            write_file(tmp_path / f"checkpoint-{step}" / "model.safetensors", WEIGHTS)
        assert open_checkpoint(tmp_path).catalog().step == 200


class TestBin:
    def test_a_tied_tensor_is_two_names_with_equal_values(self, tmp_path):
        weight = torch.randn(6, 4)
        write_file(tmp_path / "pytorch_model.bin", {"embed": weight, "head": weight})
        reader = HuggingFaceReader(Source(tmp_path))
        assert same_bytes(assemble(reader, "embed", (6, 4)), weight)
        assert same_bytes(assemble(reader, "head", (6, 4)), weight)

    def test_parts_and_turned_views_of_one_storage_are_read_by_their_own_place(self, tmp_path):
        flat = torch.arange(24, dtype=torch.float32)
        views = {"first": flat[:8], "second": flat[8:].reshape(4, 4), "turned": flat[8:].reshape(4, 4).t()}
        write_file(tmp_path / "pytorch_model.bin", views)
        reader = HuggingFaceReader(Source(tmp_path))
        for fqn, view in views.items():
            assert same_bytes(assemble(reader, fqn, tuple(view.shape)), view)

    def test_views_of_one_storage_stay_apart_while_an_export_reads_them(self, tmp_path):
        square = torch.arange(16, dtype=torch.float32).reshape(4, 4)
        write_file(tmp_path / "pytorch_model.bin", {"plain": square, "turned": square.t()})
        reader = HuggingFaceReader(Source(tmp_path))
        source = SourceBytes(reader, reader.catalog())
        for fqn, view in (("plain", square), ("turned", square.t())):
            values = source.read_fragment(reader.catalog().fragments(fqn)[0])
            assert values.tobytes() == view.contiguous().numpy().tobytes()
        source.files.close()

    def test_a_damaged_storage_is_found_through_any_part_of_it(self, tmp_path):
        flat = torch.arange(24, dtype=torch.float32)
        path = tmp_path / "pytorch_model.bin"
        write_file(path, {"first": flat[:8], "second": flat[8:]})
        content = bytearray(path.read_bytes())
        content[content.index(flat.numpy().tobytes()) + 90] ^= 1
        path.write_bytes(content)
        reader = HuggingFaceReader(Source(tmp_path))
        for fqn in ("first", "second"):
            payload = reader.payload(reader.catalog().fragments(fqn)[0])
            record = payload.part_of
            assert payload.crc32 is None
            assert record.start <= payload.start
            assert payload.start + payload.nbytes <= record.start + record.nbytes == record.start + flat.nbytes
            assert record.crc32 == zlib.crc32(flat.numpy().tobytes()) != zlib.crc32(content[record.start : record.start + record.nbytes])

    def test_a_part_of_a_damaged_storage_is_not_exported(self, tmp_path):
        flat = torch.arange(24, dtype=torch.float32)
        (tmp_path / "ckpt").mkdir()
        path = tmp_path / "ckpt/pytorch_model.bin"
        write_file(path, {"first": flat[:8], "second": flat[8:]})
        content = bytearray(path.read_bytes())
        content[content.index(flat.numpy().tobytes()) + 90] ^= 1  # in a part that is left out
        path.write_bytes(content)
        reader = HuggingFaceReader(Source(tmp_path / "ckpt"))
        source = SourceBytes(reader, reader.catalog())
        plan = make_plan(reader.catalog(), PlanRequest(drops=(("second", "not wanted"),)))
        records = tuple(execute_file(file, source, tmp_path / file.name) for file in plan.files)
        with pytest.raises(FormatError, match="values of first and others beside it have CRC32"):
            verify_shared(plan.files, records, source)
        source.files.close()

    def test_a_state_dict_with_wrappers_and_metadata_is_read(self, tmp_path):
        module = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})
        torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
        assert set(HuggingFaceReader(Source(tmp_path)).catalog().tensors) == {"weight", "bias"}

    def test_a_trainers_nested_state_is_split_into_model_and_state(self, tmp_path):
        torch.save({"model": dict(WEIGHTS), "optimizer": {"exp_avg": torch.zeros(3)}, "step": 4}, tmp_path / "pytorch_model.bin")
        catalog = HuggingFaceReader(Source(tmp_path)).catalog()
        assert set(catalog.tensors) == set(WEIGHTS)
        assert [(item.fqn, item.shape) for item in catalog.state] == [("optimizer.exp_avg", (3,))]

    def test_a_hostile_file_is_refused_by_name_and_nothing_runs(self, tmp_path):
        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "ran"),)

        torch.save({"weight": Hostile()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(HostilePickleError, match=r"posix\.mkdir"):
            open_checkpoint(tmp_path).catalog()
        assert not (tmp_path / "ran").exists()

    def test_a_dtype_no_release_can_hold_is_refused_by_name(self, tmp_path):
        write_file(tmp_path / "pytorch_model.bin", {"a": torch.zeros(2, dtype=torch.complex64)})
        assert "a has dtype complex64" in _refusal(tmp_path)

    def test_a_file_of_the_format_before_torch_1_6_is_refused_saying_so(self, tmp_path):
        torch.save(dict(WEIGHTS), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        assert "before 1.6" in _refusal(tmp_path)


def test_a_safetensors_file_of_another_libraries_metadata_is_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "mlx", "note": json.dumps({"x": 1})})
    assert list(HuggingFaceReader(Source(tmp_path)).catalog().tensors) == ["a"]
