"""Unconsolidated DCP saves in safetensors that are incomplete, mixed or odd: one test per way."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reports.errors import CoverageError, FormatError
from tasks.engine.formats.dcp_hf import DcpSafetensorsReader
from tasks.engine.formats.reader import Source
from tasks.engine.formats.readers import open_checkpoint
from tasks.saves import look_at
from tests.contract.assembled import assemble, read_values, same_bytes


def _write(folder: Path, rank: int, tensors: dict[str, tuple[list[int], torch.Tensor]], part: int = 1, parts: int = 1) -> Path:
    # As torch's HuggingFaceStorageWriter does.
    folder.mkdir(exist_ok=True)
    info = {name: {"saved_offsets": offset} for name, (offset, _) in tensors.items()}
    path = folder / f"shard-{rank:05d}-model-{part:05d}-of-{parts:05d}.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    save_file({name: tensor for name, (_, tensor) in tensors.items()}, path, metadata=metadata)
    return path


def _refusal(folder: Path) -> str:
    assert DcpSafetensorsReader.probe(folder).matches
    with pytest.raises(FormatError) as refused:
        DcpSafetensorsReader(Source(folder)).catalog()
    return str(refused.value)


def _copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "dcp_hf" / "ckpt", tmp_path / "ckpt"))


def test_a_part_no_rank_has_is_missing(written, tmp_path):
    folder = _copy(written, tmp_path)
    for path in folder.glob("*-model-00002-*"):
        path.unlink()
    assert "incomplete save: no rank has part 2 of 2" in _refusal(folder)


def test_files_of_saves_with_other_part_counts_are_mixed(written, tmp_path):
    folder = _copy(written, tmp_path)
    _write(folder, 1, {"a": ([0], torch.ones(1))}, part=1, parts=3)
    assert "saves with 2 and 3 parts are mixed" in _refusal(folder)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_without_files_whose_rows_are_a_hole_is_lost(written, tmp_path, rank):
    folder = _copy(written, tmp_path)
    for path in folder.glob(f"shard-0000{rank}-*"):
        path.unlink()
    told = _refusal(folder)
    assert f"incomplete save: files are missing: no files of shard {rank}, though there are some of shard 4" in told
    assert "embed.weight" in told
    assert look_at(folder, None).cause == "ranks-missing"


def test_a_rank_without_files_that_held_nothing_is_noted(tmp_path):
    _write(tmp_path / "ckpt", 1, {"a": ([0, 0], torch.ones(2, 3)), "norm": ([0], torch.ones(4))})
    _write(tmp_path / "ckpt", 3, {"a": ([2, 0], torch.ones(1, 3)), "norm": ([0], torch.ones(4)), "empty": ([0], torch.ones(0))})
    catalog = open_checkpoint(tmp_path / "ckpt").catalog()
    assert catalog.notes == ("no files of shard 2, though there are some of shard 3",)


def test_the_last_rank_missing_is_seen_against_the_true_shape_only(written, tmp_path):
    folder = _copy(written, tmp_path)
    for path in folder.glob("shard-00004-*"):
        path.unlink()
    catalog = open_checkpoint(folder).catalog()
    assert catalog.notes == ()
    with pytest.raises(CoverageError, match=r"embed\.weight: rows 75-98 of \(99, 16\) are in no shard"):
        catalog.check_coverage("embed.weight", (99, 16))


def test_identical_boxes_of_several_ranks_are_replicas(tmp_path):
    norm, scalar = torch.ones(4), torch.tensor(3.5)
    for rank in (1, 2, 3):
        _write(tmp_path, rank, {"norm": ([0], norm), "scale": ([], scalar)})
    reader = open_checkpoint(tmp_path)
    catalog = reader.catalog()
    assert {fqn: len(catalog.fragments(fqn)) for fqn in catalog.tensors} == {"norm": 1, "scale": 1}
    assert sorted((replica.fqn, replica.locator.path[:11]) for replica in catalog.replicas) == [
        ("norm", "shard-00002"),
        ("norm", "shard-00003"),
        ("scale", "shard-00002"),
        ("scale", "shard-00003"),
    ]
    assert same_bytes(assemble(reader, "scale", ()), scalar)
    assert all(same_bytes(read_values(reader, replica), norm) for replica in catalog.replicas if replica.fqn == "norm")


def test_rectangles_of_two_axes_are_put_together(tmp_path):
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    for rank, (rows, columns) in enumerate([((0, 3), (0, 4)), ((0, 3), (4, 7)), ((3, 5), (0, 4)), ((3, 5), (4, 7))], start=1):
        box = whole[slice(*rows), slice(*columns)].contiguous()
        _write(tmp_path, rank, {"w": ([rows[0], columns[0]], box)})
    assert same_bytes(assemble(open_checkpoint(tmp_path), "w", (5, 7)), whole)


def test_an_empty_box_is_left_out(tmp_path):
    _write(tmp_path, 1, {"w": ([0, 0], torch.ones(3, 2))})
    _write(tmp_path, 2, {"w": ([3, 0], torch.ones(0, 2))})
    catalog = open_checkpoint(tmp_path).catalog()
    assert len(catalog.fragments("w")) == 1
    catalog.check_coverage("w", (3, 2))


def test_one_tensor_in_two_dtypes_is_refused(tmp_path):
    _write(tmp_path, 1, {"w": ([0], torch.ones(2))})
    _write(tmp_path, 2, {"w": ([2], torch.ones(2, dtype=torch.bfloat16))})
    assert "w is BF16 of 1 dims and F32 of 1 dims; parts of two saves?" in _refusal(tmp_path)


@pytest.mark.parametrize("offset", [[0, 0], [], [-1], [0.5], "0", None])
def test_a_box_without_a_valid_offset_is_refused(tmp_path, offset):
    _write(tmp_path, 1, {"w": (offset, torch.ones(2))})
    assert "w: no valid offset is recorded" in _refusal(tmp_path)


@pytest.mark.parametrize("info", ["{", "[]"])
def test_malformed_sharding_info_is_refused(tmp_path, info):
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"DCP_SHARDING_INFO": info})
    assert "DCP_SHARDING_INFO is not" in _refusal(tmp_path)


def test_a_file_without_sharding_info_is_refused_by_name(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    assert "shard-00001-model-00001-of-00001.safetensors: does not record DCP_SHARDING_INFO" in _refusal(tmp_path)


def test_a_sharded_folder_that_was_never_consolidated_is_read_from_outside(written, tmp_path):
    shutil.copytree(written / "dcp_hf" / "ckpt", tmp_path / "step-5" / "sharded")
    catalog = open_checkpoint(tmp_path / "step-5").catalog()
    assert (catalog.format, catalog.step) == ("dcp_hf", 5)
    assert all(file.startswith("sharded/") for file in catalog.table.files)


def test_a_consolidated_folder_is_read_as_hugging_face(written, tmp_path):
    shutil.copytree(written / "dcp_hf" / "ckpt", tmp_path / "sharded")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).catalog().format == "hf"


def test_files_on_another_nodes_disk_are_found(written, tmp_path):
    folder, other = _copy(written, tmp_path), tmp_path / "node1"
    other.mkdir()
    for path in folder.glob("shard-00002-*"):
        path.rename(other / path.name)
    assert open_checkpoint(folder, also=[other]).catalog().notes == ()
    open_checkpoint(folder, also=[other]).catalog().check_coverage("embed.weight", (99, 16))
