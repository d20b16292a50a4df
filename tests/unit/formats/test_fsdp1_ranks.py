"""Per-rank files that are incomplete, flat or odd, and the boxes that placements stand for."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import FormatError, HostilePickleError
from tasks.engine.formats.distributed_pickles import cut
from tasks.engine.formats.fsdp1_ranks import RankFilesReader
from tasks.engine.formats.reader import Source
from tasks.engine.formats.readers import open_checkpoint
from tests.contract.assembled import assemble, read_values, same_bytes


def _refusal(folder: Path) -> str:
    assert RankFilesReader.probe(folder).matches
    with pytest.raises(FormatError) as refused:
        RankFilesReader(Source(folder)).catalog()
    return str(refused.value)


def _copy(written: Path, tmp_path: Path, layout: str = "fsdp1_dtensors") -> Path:
    return Path(shutil.copytree(written / layout / "ckpt", tmp_path / "ckpt"))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("layout", ["fsdp1_dtensors", "fsdp1_sharded_tensors"])
def test_a_missing_rank_is_named(written, tmp_path, layout, rank):
    folder = _copy(written, tmp_path, layout)
    (folder / f"model_world_size_4_rank_{rank}.pt").unlink()
    assert f"1 of 4 files are missing: model_world_size_4_rank_{rank}.pt; rank {rank} lost" in _refusal(folder)


def test_flat_parameters_are_refused_with_the_reason(written):
    told = _refusal(written / "fsdp1_local" / "ckpt")
    assert "_flat_param is a flat parameter (FSDP1 LOCAL_STATE_DICT): the original shapes are in no file" in told
    assert "SHARDED_STATE_DICT" in told


def test_files_of_two_world_sizes_are_mixed(written, tmp_path):
    folder = _copy(written, tmp_path)
    shutil.copy(folder / "model_world_size_4_rank_0.pt", folder / "model_world_size_8_rank_0.pt")
    assert "files of several saves are mixed" in _refusal(folder)


def test_a_file_cut_short_is_refused_by_name(written, tmp_path):
    folder = _copy(written, tmp_path)
    path = folder / "model_world_size_4_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: torch.save archive has no end record" in _refusal(folder)


def test_a_hostile_file_is_refused_by_name(tmp_path):
    class Hostile:
        def __reduce__(self):
            return eval, ("1/0",)

    torch.save({"weight": Hostile()}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(HostilePickleError, match=r"eval"):
        open_checkpoint(tmp_path).catalog()


def test_names_without_a_world_size_show_a_gap_between_ranks(tmp_path):
    for rank in (0, 2):
        torch.save({"a": torch.ones(2)}, tmp_path / f"model.rank_{rank}.pth")
    assert "files are missing: model.rank_1.pth; rank 1 lost" in _refusal(tmp_path)


def test_one_rank_alone_holds_plain_tensors(tmp_path):
    weight = torch.randn(3, 2)
    torch.save({"a": weight}, tmp_path / "model_world_size_1_rank_0.pt")
    assert same_bytes(assemble(open_checkpoint(tmp_path), "a", (3, 2)), weight)


def test_plain_tensors_of_several_ranks_are_replicas_even_where_they_differ(tmp_path):
    for rank in (0, 1):
        torch.save({"a": torch.full((2,), float(rank))}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    reader = open_checkpoint(tmp_path)
    assert same_bytes(assemble(reader, "a", (2,)), torch.zeros(2))
    assert [read_values(reader, replica).tolist() for replica in reader.catalog().replicas] == [[1.0, 1.0]]


def test_ranks_that_disagree_on_a_shape_are_refused(tmp_path):
    for rank in (0, 1):
        torch.save({"a": torch.zeros(2 + rank)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    assert "a has shape (3,), in other ranks' files (2,); parts of two saves?" in _refusal(tmp_path)


def test_ranks_that_disagree_on_a_dtype_are_refused(tmp_path):
    for rank, dtype in enumerate((torch.float32, torch.bfloat16)):
        torch.save({"a": torch.zeros(2, dtype=dtype)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    assert "a is bfloat16 and float32; parts of two saves?" in _refusal(tmp_path)


def test_verls_folder_is_read_from_outside_and_optimizer_files_stay_aside(written, tmp_path):
    shutil.copytree(written / "hsdp_dtensors" / "ckpt", tmp_path / "global_step_12" / "actor")
    (tmp_path / "global_step_12" / "actor" / "optim_world_size_4_rank_0.pt").write_bytes(b"cos\nsystem\n.")
    catalog = open_checkpoint(tmp_path).catalog()
    assert [item.fqn for item in catalog.state] == ["optim_world_size_4_rank_0.pt"]
    assert (catalog.format, catalog.step, set(catalog.tensors)) == (
        "fsdp1_ranks",
        12,
        {"embed.weight", "up.weight", "up.bias", "down.weight", "few.weight", "scale", "steps"},
    )


@given(st.integers(0, 200), st.integers(1, 9))
def test_a_dim_is_cut_as_torch_chunk_cuts(length, parts):
    lengths = [len(chunk) for chunk in torch.arange(length).chunk(parts)] if length else []
    cuts = [cut(length, parts, part) for part in range(parts)]
    assert [size for _, size in cuts if size] == lengths
    assert [start for start, size in cuts if size] == [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.parametrize(
    ("before", "behind", "says"),
    [
        (b"Shard\n", b"Other\n", "placement_types.Other"),
        (b"Shard\n", b"_StridedShard\n", "split_factor"),
        (b"Shard\n", b"Replicate\n", "placements give"),
    ],
    ids=["unknown placement", "strided placement of no TP", "placements that contradict the part"],
)
def test_a_dtensor_with_other_placements_is_refused(written, tmp_path, before, behind, says):
    folder = _copy(written, tmp_path)
    torch_file = folder / "model_world_size_4_rank_0.pt"
    _rewrite(torch_file, b"ctorch.distributed.tensor.placement_types\n" + before, b"ctorch.distributed.tensor.placement_types\n" + behind)
    assert says in _refusal(folder)


def _rewrite(path: Path, before: bytes, behind: bytes) -> None:
    # The archive again, with other bytes in its data.pkl.
    import zipfile

    with zipfile.ZipFile(path) as saved:
        records = {info.filename: saved.read(info) for info in saved.infolist()}
    with zipfile.ZipFile(path, "w") as made:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                assert before in content
                content = content.replace(before, behind)
            made.writestr(name, content)
