"""Pipelines and native experts of DeepSpeed, over any number of ranks: engine and second path give back every weight and moment."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.witnesses.sources import decode_source
from tests.builders.zero import SLOTS, Tensors, Zero
from tests.builders.zero_parallel import EXPERT, write_experts, write_pipeline
from tests.contract.assembled import assemble, gather, same_bytes

TIED = "tied_modules.embed.weight"


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _hold(folder: Path, truth: Tensors, trained: dict[str, Zero]) -> None:
    reader = open_checkpoint(folder.parent)
    assert set(reader.catalog().tensors) == set(truth)
    stored = decode_source("zero", (folder,))
    assert set(stored) == set(truth)
    for name, value in truth.items():
        assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        assert same_bytes(gather(stored, name, value), value), name
    for name, zero in trained.items():
        for slot in SLOTS:
            local = name if name in zero.masters else EXPERT.format(int(name.split(".")[-3]) % len(zero.masters))
            assert same_bytes(assemble(reader, f"{slot}/{name}", tuple(truth[name].shape)), zero.moment(slot, local)), name


@given(st.integers(1, 4), st.sampled_from([1, 2]), st.booleans())
def test_a_pipeline_is_its_stages_and_what_only_layer_files_hold(world, stage, maps):
    tied = _randn(5, 3)
    first = Zero({TIED: tied, "1.weight": _randn(4, 3)}, stage, world, maps=maps)
    last = Zero({"2.weight": _randn(3, 3), TIED: tied}, stage, world, maps=maps)
    frozen = _randn(3, 2)
    layers = {
        "00": {"weight": tied},
        "01": {"weight": first.masters["1.weight"]},
        "02": {"weight": last.masters["2.weight"], "frozen": frozen},
    }
    with tempfile.TemporaryDirectory() as root:
        folder = write_pipeline(Path(root), [first, last], layers=layers)
        truth = {**first.masters, **last.masters, "2.frozen": frozen.to(torch.bfloat16)}
        _hold(folder, truth, {"1.weight": first, "2.weight": last, TIED: first})
        reader = open_checkpoint(Path(root))
        source = SourceBytes(reader, reader.catalog())
        assert check_replicas(make_plan(reader.catalog(), PlanRequest()), source) == tied.nbytes
        source.files.close()


@given(st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 3), (6, 2), (3, 1)]), st.integers(1, 3), st.booleans())
def test_experts_have_their_global_numbers(degrees, local, maps):
    world, ep_degree = degrees
    experts = [_randn(3, 5) for _ in range(local * ep_degree)]
    dense = Zero({"embed.weight": _randn(7, 3), "gate.weight": _randn(len(experts), 3)}, 2, world, maps=maps)
    with tempfile.TemporaryDirectory() as root:
        folder = write_experts(Path(root), dense, [{EXPERT: value} for value in experts], ep_degree=ep_degree)
        names = [EXPERT.format(number) for number in range(len(experts))]
        group = Zero({EXPERT.format(n): experts[n] for n in range(local)}, 2)
        _hold(folder, {**dense.masters, **dict(zip(names, experts, strict=True))}, {**dict.fromkeys(names, group), "embed.weight": dense})


def test_a_tied_module_that_differs_between_stages_is_refused(tmp_path):
    stages = [Zero({TIED: _randn(5, 3), f"{n}.weight": _randn(3)}, 1, 2) for n in (1, 2)]
    write_pipeline(tmp_path, stages, layers={})
    reader = open_checkpoint(tmp_path)
    source = SourceBytes(reader, reader.catalog())
    with pytest.raises(ValueError, match="differ between"):
        check_replicas(make_plan(reader.catalog(), PlanRequest()), source)
    source.files.close()


def test_a_stage_whose_files_are_lost_is_named(tmp_path):
    stages = [Zero({f"{n}.weight": _randn(8)}, 1, 2) for n in (1, 2)]
    folder = write_pipeline(tmp_path, stages, layers={})
    shutil.move(folder / "mp_rank_01_model_states.pt", tmp_path / "aside")
    with pytest.raises(ValueError, match=r"1 of 2 files are missing: mp_rank_01_model_states\.pt"):
        open_checkpoint(tmp_path).catalog()
    shutil.move(tmp_path / "aside", folder / "mp_rank_01_model_states.pt")
    (folder / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"bf16_zero_pp_rank_1_mp_rank_01_optim_states\.pt; rank 1 lost"):
        open_checkpoint(tmp_path).catalog()
