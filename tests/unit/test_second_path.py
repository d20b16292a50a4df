"""The second path's values, against files written by safetensors and torch, cut by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reports.errors import CoverageError, FormatError, UnmappedError
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.second_path import SecondPath
from tests.builders.plans import Made, Take, whole, write_plan

Shape = tuple[int, ...]
HEADS, HEAD_DIM, COLS = 3, 8, 5


def _write_shards(folder: Path, shards: list[dict[str, tuple[Shape, torch.Tensor]]]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, boxes in enumerate(shards, start=1):
        info = {name: {"saved_offsets": list(offset)} for name, (offset, _) in boxes.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        file = folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file({name: values.contiguous() for name, (_, values) in boxes.items()}, file, metadata=metadata)
    return folder


def _gather(witness: SecondPath, name: str, max_numel: int = 7) -> torch.Tensor:
    out = torch.full(witness.targets[name].shape, float("nan"))
    for piece in witness.pieces(name, max_numel):
        assert piece.values.numel() <= max_numel
        cut = tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.shape, strict=True))
        assert bool(torch.isnan(out[cut]).all())
        out[cut] = piece.values
    return out


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(HEADS * HEAD_DIM, COLS, generator=torch.Generator().manual_seed(1))


def _hear(tmp_path: Path, shards: list[dict[str, tuple[Shape, torch.Tensor]]], *targets: Made) -> SecondPath:
    root = _write_shards(tmp_path / "source", shards)
    return SecondPath(write_plan(tmp_path / "plan.json", "dcp_hf", root, list(targets)), (root,))


def _rectangles(name: str, weight: torch.Tensor) -> list[dict[str, tuple[Shape, torch.Tensor]]]:
    rows, cols = 9, 2
    return [
        {name: ((0, 0), weight[:rows, :cols])},
        {name: ((0, cols), weight[:rows, cols:])},
        {name: ((rows, 0), weight[rows:, :cols])},
        {name: ((rows, cols), weight[rows:, cols:])},
    ]


def test_rectangles_of_a_two_dimensional_mesh_make_the_tensor(tmp_path, weight):
    witness = _hear(tmp_path, _rectangles("w", weight), whole("w", tuple(weight.shape), "F32"))
    assert torch.equal(_gather(witness, "w"), weight)


@pytest.mark.parametrize("max_numel", [1, 4, 1000])
def test_rope_pairs_become_halves_though_shards_cut_heads_and_pairs(tmp_path, weight, max_numel):
    target = whole("w", tuple(weight.shape), "F32", op="rope_to_halves", head_dim=HEAD_DIM)
    witness = _hear(tmp_path, _rectangles("w", weight), target)
    halves = weight.view(HEADS, HEAD_DIM // 2, 2, COLS).transpose(1, 2).reshape(HEADS * HEAD_DIM, COLS)
    assert torch.equal(_gather(witness, "w", max_numel), halves)


def test_rope_halves_of_a_bias(tmp_path, weight):
    bias = weight[:, 0].contiguous()
    shards = [{"b": ((0,), bias[:11])}, {"b": ((11,), bias[11:])}]
    witness = _hear(tmp_path, shards, whole("b", tuple(bias.shape), "F32", op="rope_to_halves", head_dim=HEAD_DIM))
    assert torch.equal(_gather(witness, "b"), bias.view(HEADS, HEAD_DIM // 2, 2).transpose(1, 2).reshape(-1))


def test_an_expert_is_a_box_of_the_fused_tensor_without_its_leading_dim(tmp_path):
    fused = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))
    shards = [{"fused": ((0, 0, 0), fused[:3])}, {"fused": ((3, 0, 0), fused[3:])}]
    up = Made("up", (3, 3), "F32", (Take("fused", (4, 6, 3), (3, 3, 0), (1, 3, 3)),))
    assert torch.equal(_gather(_hear(tmp_path, shards, up), "up"), fused[3, 3:])


def test_several_inputs_stand_one_below_the_other(tmp_path, weight):
    shards = [{"a": ((0, 0), weight[:4]), "b": ((0, 0), weight[4:])}]
    both = Made("w", tuple(weight.shape), "F32", (Take("a", (4, COLS)), Take("b", (HEADS * HEAD_DIM - 4, COLS))))
    assert torch.equal(_gather(_hear(tmp_path, shards, both), "w"), weight)


def test_only_the_rows_asked_for_are_given(tmp_path, weight):
    target = whole("w", tuple(weight.shape), "F32", op="rope_to_halves", head_dim=HEAD_DIM)
    witness = _hear(tmp_path, _rectangles("w", weight), target)
    halves = weight.view(HEADS, HEAD_DIM // 2, 2, COLS).transpose(1, 2).reshape(HEADS * HEAD_DIM, COLS)
    out = torch.zeros_like(halves)
    for piece in witness.pieces("w", 6, rows=(6, 19)):
        out[tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.shape, strict=True))] = piece.values
    assert torch.equal(out[6:19], halves[6:19])
    assert not out[:6].any()
    assert not out[19:].any()


def test_a_zero_dimensional_tensor_is_one_piece(tmp_path):
    witness = _hear(tmp_path, [{"scale": ((), torch.tensor(3.5))}], whole("scale", (), "F32"))
    assert [piece.values.item() for piece in witness.pieces("scale", 10)] == [3.5]


def test_replicas_count_once(tmp_path, weight):
    shards = [{"w": ((0, 0), weight)}, {"w": ((0, 0), weight)}]
    assert torch.equal(_gather(_hear(tmp_path, shards, whole("w", tuple(weight.shape), "F32")), "w"), weight)


def test_a_hole_in_the_source_is_named(tmp_path, weight):
    witness = _hear(tmp_path, _rectangles("w", weight)[:3], whole("w", tuple(weight.shape), "F32"))
    with pytest.raises(CoverageError, match="w: what the source holds does not tile"):
        list(witness.pieces("w", 10))


def test_an_overlap_that_hides_a_hole_of_the_same_size_is_named(tmp_path, weight):
    shards = [{"w": ((0, 0), weight[:12])}, {"w": ((11, 0), weight[11:23])}]
    witness = _hear(tmp_path, shards, whole("w", tuple(weight.shape), "F32"))
    with pytest.raises(CoverageError, match="does not tile"):
        list(witness.pieces("w", 10))


def test_a_source_tensor_that_is_not_there_is_named(tmp_path, weight):
    witness = _hear(tmp_path, _rectangles("w", weight), whole("v", tuple(weight.shape), "F32", source="model.v"))
    with pytest.raises(UnmappedError) as caught:
        list(witness.pieces("v", 10))
    assert caught.value.missing == ("model.v",)


def test_an_operation_it_does_not_know_is_not_heard(tmp_path, weight):
    witness = _hear(tmp_path, _rectangles("w", weight), whole("w", tuple(weight.shape), "F32", op="rotate"))
    with pytest.raises(NotHeardError, match="rotate"):
        list(witness.pieces("w", 10))


@pytest.mark.parametrize("source_format", ["fsdp1_ranks", "own"])
def test_a_format_without_a_second_decoder_is_not_heard_with_the_reason(tmp_path, source_format):
    with pytest.raises(NotHeardError, match=r"ShardedTensor|no second decoder for format 'own'"):
        SecondPath(write_plan(tmp_path / "plan.json", source_format, tmp_path, []), (tmp_path,))


def test_a_plan_of_another_schema_is_not_heard(tmp_path):
    (tmp_path / "plan.json").write_text('{"schema": "shardwright.plan/9"}')
    with pytest.raises(NotHeardError, match="plan/9"):
        SecondPath(tmp_path / "plan.json", (tmp_path,))


def test_classic_bin_shards_with_shared_and_transposed_storages(tmp_path, weight):
    tied = {"embed": weight, "head": weight, "turned": weight.t(), "part": weight[3:7]}
    torch.save(tied, tmp_path / "pytorch_model.bin")
    targets = [whole(name, tuple(value.shape), "F32") for name, value in tied.items()]
    witness = SecondPath(write_plan(tmp_path / "plan.json", "hf", tmp_path, targets), (tmp_path,))
    for name, value in tied.items():
        assert torch.equal(_gather(witness, name), value)


def test_wrapper_prefixes_are_stripped(tmp_path, weight):
    wrapped = "module._orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w"
    save_file({wrapped: weight}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = whole("layers.0.w", tuple(weight.shape), "F32")
    witness = SecondPath(write_plan(tmp_path / "plan.json", "hf", tmp_path, [target]), (tmp_path,))
    assert torch.equal(_gather(witness, "layers.0.w"), weight)


def test_a_safetensors_file_cut_short_is_named(tmp_path, weight):
    save_file({"w": weight}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    plan = write_plan(tmp_path / "plan.json", "hf", tmp_path, [whole("w", tuple(weight.shape), "F32")])
    with pytest.raises(FormatError, match=r"model\.safetensors.*refuses"):
        SecondPath(plan, (tmp_path,))


def test_a_bin_file_that_would_run_code_is_refused_by_torch_and_nothing_runs(tmp_path):
    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"w": Touch()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="torch cannot load"):
        SecondPath(write_plan(tmp_path / "plan.json", "hf", tmp_path, []), (tmp_path,))
    assert not (tmp_path / "ran").exists()


def test_an_index_that_points_outside_the_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../other.safetensors"}}')
    with pytest.raises(FormatError, match="outside the checkpoint"):
        SecondPath(write_plan(tmp_path / "plan.json", "hf", tmp_path, []), (tmp_path,))


def test_a_tensor_in_two_files_is_named(tmp_path, weight):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": weight}, tmp_path / name)
    with pytest.raises(FormatError, match="w is in two files"):
        SecondPath(write_plan(tmp_path / "plan.json", "hf", tmp_path, []), (tmp_path,))
