"""DeepSpeed saves of tensor-parallel ranks: whatever the rule by which a parameter was cut, engine and second path give it back whole."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import FormatError
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.sources import decode_source
from tests.builders.zero import SLOTS, Tensors, Zero
from tests.builders.zero_parallel import write_tensor_parallel
from tests.contract.assembled import assemble, gather, same_bytes

VOCABULARY = 11
WHOLE = {
    "embed.weight": (VOCABULARY, 3),
    "layers.0.qkv.weight": (12, 5),
    "layers.0.up_gate.weight": (16, 3),
    "layers.0.down.weight": (5, 8),
    "layers.0.down.bias": (5,),
    "layers.0.up.bias": (9,),
    "norm.weight": (5,),
}
TOLD = {
    "universal_checkpoint_version": 0.3,
    "tp_replicated_parameter_patterns": [r"norm\.weight", r"layers\.\d+\.down\.bias"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*up_gate\.weight$"],
    "parameter_with_sub_params": [{"patterns": [r"layers\.\d+\.qkv\.weight"], "shape": (3, -1), "partition_dim": 0}],
    "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
    "vocabulary_parameter_patterns": ["embed"],
    "original_vocab_size": VOCABULARY,
}


def cut(name: str, value: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """The parts of a parameter, as a trainer of TOLD would hold them."""
    match name.rsplit(".", 2)[-2]:
        case "norm":
            return [value] * tp
        case "down":
            return [part.contiguous() for part in value.chunk(tp, 1)] if value.ndim == 2 else [value] * tp
        case "up_gate":
            return [torch.cat(parts) for parts in zip(*(half.chunk(tp) for half in value.chunk(2)), strict=True)]
        case "qkv":
            return [torch.cat(parts) for parts in zip(*(third.chunk(tp) for third in value.chunk(3)), strict=True)]
        case "embed":
            padded = torch.cat([value, torch.full((-len(value) % (2 * tp), value.shape[1]), -5.0)])
            return list(padded.chunk(tp))
    return list(value.tensor_split(tp))


def ranks_of(whole: Tensors, tp: int, **layout: object) -> list[Zero]:
    """One save's ranks, with moments cut as their parameters are."""
    moments = {slot: {name: torch.randn(value.shape) for name, value in whole.items()} for slot in SLOTS}
    parts = {name: cut(name, value, tp) for name, value in whole.items()}
    of = {slot: {name: cut(name, value, tp) for name, value in own.items()} for slot, own in moments.items()}
    made = []
    for rank in range(tp):
        held = {slot: {name: own[rank] for name, own in cuts.items()} for slot, cuts in of.items()}
        made.append(Zero({name: own[rank] for name, own in parts.items()}, moments=held, **layout))  # type: ignore[arg-type]
    return made


def _hold(root: Path, whole: Tensors, ranks: list[Zero]) -> None:
    reader = open_checkpoint(root)
    catalog = reader.catalog()
    assert {name: tensor.shape for name, tensor in catalog.tensors.items()} == {name: tuple(v.shape) for name, v in whole.items()}
    stored = decode_source("zero", (root / ranks[0].tag,))
    for name, value in whole.items():
        assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        assert same_bytes(gather(stored, name, value), value), name
    for slot in SLOTS:
        for name, value in whole.items():
            found = assemble(reader, f"{slot}/{name}", tuple(value.shape))
            parts = cut(name, found, len(ranks))
            rows = [
                len(part) if name != "embed.weight" else max(0, min(len(part), VOCABULARY - r * len(part))) for r, part in enumerate(parts)
            ]
            for rank, part, count in zip(ranks, parts, rows, strict=True):
                assert same_bytes(part[:count], rank.moment(slot, name)[:count]), (slot, name)


@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans())
def test_parts_join_by_the_writers_record(stage, tp, world, maps):
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    ranks = ranks_of(whole, tp, stage=stage, world=world, maps=maps, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as root:
        write_tensor_parallel(Path(root), ranks, TOLD)
        if tp > 1:
            _hold(Path(root), whole, ranks)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_that_no_optimizer_holds_join_too(tmp_path, stage):
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    frozen = {} if stage == 0 else {"layers.1.down.weight": torch.randn(5, 8), "layers.1.up_gate.weight": torch.randn(16, 3)}
    ranks = ranks_of(whole, 2, stage=stage, dtype=torch.float32)
    parts = {name: cut(name, value, 2) for name, value in frozen.items()}
    ranks = [Zero(**{**_fields(zero), "frozen": {name: own[rank] for name, own in parts.items()}}) for rank, zero in enumerate(ranks)]
    write_tensor_parallel(tmp_path, ranks, TOLD)
    reader = open_checkpoint(tmp_path)
    stored = decode_source("zero", (tmp_path / ranks[0].tag,))
    for name, value in {**whole, **frozen}.items():
        assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        assert same_bytes(gather(stored, name, value), value), name


def _fields(zero: Zero) -> dict[str, object]:
    return {name: getattr(zero, name) for name in zero.__dataclass_fields__}


def test_what_the_user_says_in_a_folder_of_its_own_counts_where_the_writer_said_nothing(tmp_path):
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    folder = write_tensor_parallel(tmp_path / "run", ranks_of(whole, 2, dtype=torch.float32), None)
    with pytest.raises(FormatError, match=r"is of 2 tensor-parallel ranks, and no file says how .* universal_checkpoint_info\.json"):
        open_checkpoint(tmp_path / "run").catalog()
    (tmp_path / "said").mkdir()
    (tmp_path / "said/universal_checkpoint_info.json").write_text(json.dumps(TOLD))
    reader = open_checkpoint(tmp_path / "run", also=[tmp_path / "said"])
    stored = decode_source("zero", (folder, tmp_path / "said"))
    for name, value in whole.items():
        assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        assert same_bytes(gather(stored, name, value), value), name


def test_replicated_parts_that_differ_are_refused(tmp_path):
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    ranks = ranks_of(whole, 2, dtype=torch.float32)
    ranks[1].masters["norm.weight"] = whole["norm.weight"] + 1
    write_tensor_parallel(tmp_path, ranks, TOLD)
    reader = open_checkpoint(tmp_path)
    source = SourceBytes(reader, reader.catalog())
    with pytest.raises(ValueError, match=r"norm\.weight.*differ between"):
        check_replicas(make_plan(reader.catalog(), PlanRequest()), source)
    source.files.close()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({**TOLD, "tp_replicated_parameter_patterns": [".*"]}, "embed.weight of 2 tensor-parallel ranks|replicated parts have shapes"),
        ({**TOLD, "parameter_with_row_parallelism_patterns": []}, None),
        ({**TOLD, "tp_replicated_parameter_patterns": ["(a+)+$"]}, "repeats a group"),
        ({**TOLD, "tp_replicated_parameter_patterns": "norm"}, "a str in place of a list"),
        ({**TOLD, "tp_replicated_parameter_patterns": ["["]}, "is not what DeepSpeed writes"),
        ({**TOLD, "parameter_with_sub_params": [{"patterns": ["q"], "shape": (3, -1), "partition_dim": 1}]}, "along dim 1"),
        ({**TOLD, "parameter_with_sub_params": [{"patterns": [".*qkv"], "shape": (5, -1), "partition_dim": 0}]}, "not sub-parameters of"),
        ({**TOLD, "autotp_unsupported_parameter_patterns": {"norm": "fused"}}, r"could not describe its parts \(fused\)"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(tmp_path, told, says):
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    write_tensor_parallel(tmp_path, ranks_of(whole, 2, dtype=torch.float32), told)
    if says is None:  # a wrong rule that fits is the config's to find
        assert open_checkpoint(tmp_path).catalog().tensors["layers.0.down.weight"].shape == (10, 4)
        return
    with pytest.raises(FormatError, match=says):
        open_checkpoint(tmp_path).catalog()


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 3)])
def test_rank_files_carry_maps_too(tmp_path, stage, world):
    """As AutoTP writes them: a map of pieces beside the lists, which may say what lists cannot."""
    whole = {"mixed.weight": torch.randn(12, 4), "same.bias": torch.randn(3)}
    order = [0, 2, 1, 3]  # blocks of three rows, dealt to two ranks in this order
    blocks = whole["mixed.weight"].split(3)
    parts = [
        {"mixed.weight": torch.cat([blocks[order[2 * rank]], blocks[order[2 * rank + 1]]]), "same.bias": whole["same.bias"]}
        for rank in (0, 1)
    ]
    ranks = [Zero(own, stage=stage, world=world, dtype=torch.float32) for own in parts]

    def piece(rank: int, slot: int) -> dict[str, object]:
        at = 12 * order[2 * rank + slot]
        return {"shape": [3, 4], "source": [at, [4, 1]], "dest": [12 * slot, [4, 1]], "locations": [rank]}

    mixed = {rank: {"shard_shape": [6, 4], "pieces": [piece(rank, slot) for slot in (0, 1)]} for rank in (0, 1)}
    everywhere = {"shape": [3], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1]}
    same = {rank: {"shard_shape": [3], "pieces": [everywhere]} for rank in (0, 1)}
    maps = {r"^mixed\.weight$": {"logical_shape": [12, 4], "ranks": mixed}, r"^same\.bias$": {"logical_shape": [3], "ranks": same}}
    folder = write_tensor_parallel(tmp_path, ranks, {"affine_map": {"version": 1, "params": maps}})
    reader = open_checkpoint(tmp_path)
    stored = decode_source("zero", (folder,))
    for name, value in whole.items():
        assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        assert same_bytes(gather(stored, name, value), value), name
    everywhere["scale"] = 0.5
    shutil.rmtree(tmp_path / folder.name)
    (tmp_path / "latest").unlink()
    write_tensor_parallel(tmp_path, ranks, {"affine_map": {"version": 1, "params": maps}})
    with pytest.raises(FormatError, match=r"same\.bias of 2 tensor-parallel ranks: its parts are scaled"):
        open_checkpoint(tmp_path).catalog()
    with pytest.raises(NotHeardError, match="scales"):
        decode_source("zero", (folder,))


@given(st.sampled_from([1, 2]), st.integers(1, 2))
def test_pipelines_of_tensor_parallel_ranks_join_stage_by_stage(tp, world):
    first = {"1.qkv.weight": torch.randn(12, 5), "1.norm.weight": torch.randn(5)}
    last = {"2.down.weight": torch.randn(5, 8)}
    told = {
        "tp_replicated_parameter_patterns": [r"\d+\.norm"],
        "parameter_with_sub_params": [{"patterns": [r"\d+\.qkv"], "shape": (3, -1), "partition_dim": 0}],
        "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
    }
    ranks = [zero for own in (first, last) for zero in ranks_of(own, tp, stage=1, world=world, dtype=torch.float32)]
    with tempfile.TemporaryDirectory() as root:
        folder = write_tensor_parallel(Path(root), ranks, told, stages=2)
        reader = open_checkpoint(Path(root))
        stored = decode_source("zero", (folder,))
        for name, value in {**first, **last}.items():
            assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
            assert same_bytes(gather(stored, name, value), value), name
