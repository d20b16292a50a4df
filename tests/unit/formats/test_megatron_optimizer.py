"""Optimizers in Megatron's legacy files: which parameter each tensor is of, rebuilt from the orders Megatron writes them in."""

import pytest
import torch

from tasks.engine.formats.readers import open_checkpoint
from tests.builders.megatron import Grid, Model, edit_rank, write_legacy
from tests.builders.megatron_optimizer import MASTER, MOMENTS
from tests.contract.assembled import assemble, same_bytes

BF16 = torch.bfloat16
LAYOUTS = {
    "tp_pp": (Model(qkv_bias=True, dtype=BF16), Grid(tp=2, pp=2)),
    "tied_vpp": (Model(tied=True, dtype=BF16), Grid(pp=2, vpp=2)),
    "experts": (Model(experts=4, dtype=BF16), Grid(tp=2, ep=2)),
    "sparse": (Model(experts=4, dtype=BF16), Grid(tp=2, ep=2, etp=1, experts_as="te_grouped")),
    "experts_not_parallel": (Model(experts=4, dtype=BF16), Grid(tp=2)),
    "one_expert_rank_each": (Model(experts=4, dtype=BF16), Grid(ep=2)),
    "tied_pp": (Model(tied=True, padded=12, dtype=BF16), Grid(pp=2)),  # 96 elements of the head: its bucket ends between multiples of 64
    "uneven_vpp": (Model(dtype=BF16), Grid(tp=2, pp=2, vpp=2, stages=((1, 0), (1, 2)))),
    "buckets": (Model(hidden=64, heads=4, groups=2, head_dim=16, ffn=64, dtype=BF16), Grid(args={"ddp_bucket_size": 9000})),
    "grouped": (Model(experts=4, dtype=BF16), Grid(ep=2, experts_as="grouped", prefix="module.")),
}


@pytest.mark.parametrize("kind", ["plain", "masters", "distributed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_slot_is_found_by_its_parameter(layout, kind, tmp_path):
    model, grid = LAYOUTS[layout]
    truth = write_legacy(tmp_path, model, grid, optimizer=kind)
    reader = open_checkpoint(tmp_path)
    catalog = reader.catalog()
    slots = MOMENTS | ({} if kind == "plain" else {"master": MASTER})
    expected = {f"{slot}/{name}" for slot in slots for name in truth}
    expected |= set() if kind == "distributed" else {f"step/{name}" for name in truth}
    assert set(catalog.state_tensors) == expected
    for slot, factor in slots.items():
        for name, value in truth.items():
            assert same_bytes(assemble(reader, f"{slot}/{name}", tuple(value.shape)), value.float() * factor), (slot, name)
    if kind != "distributed":
        assert assemble(reader, f"step/{next(iter(truth))}", ()) == 5


def _first_group(held: dict) -> dict:
    return held["optimizer"]["param_groups"][0]


UNFIT = {
    "a parameter more than names tell": (lambda held: _first_group(held)["params"].append(99), "parameter group 0"),
    "groups of another kind": (lambda held: _first_group(held).update(wd_mult=0.0), "parameter group 0"),
    "a moment of another shape": (
        lambda held: held["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)),
        "has shape (16, 8), its optimizer state (3,)",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_state_that_does_not_fit_its_names_is_listed_and_noted(case, tmp_path):
    change, said = UNFIT[case]
    truth = write_legacy(tmp_path, Model(), Grid(), optimizer="plain")
    edit_rank(tmp_path / "mp_rank_00", change)
    catalog = open_checkpoint(tmp_path).catalog()
    assert (set(catalog.tensors), dict(catalog.state_tensors)) == (set(truth), {})
    assert said in catalog.notes[0]
    assert "mp_rank_00.optimizer" in {item.fqn for item in catalog.state}


def test_a_flat_vector_of_another_length_is_listed_and_noted(tmp_path):
    write_legacy(tmp_path, Model(dtype=BF16), Grid(), optimizer="distributed")
    path = tmp_path / "mp_rank_00" / "distrib_optim.pt"
    held = torch.load(path, weights_only=False)
    next(iter(held[0].values()))["numel_unpadded"] += 64
    torch.save(held, path)
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.state_tensors == {}
    assert "a flat vector of" in catalog.notes[0]


def test_buckets_that_end_between_alignments_are_listed_and_noted(tmp_path):
    write_legacy(tmp_path, Model(dtype=BF16), Grid(args={"ddp_bucket_size": 100}), optimizer="distributed")
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.state_tensors == {}
    assert "aligned in one bucket" in catalog.notes[0]


def test_a_buffer_of_another_dtype_is_listed_and_noted(tmp_path):
    write_legacy(tmp_path, Model(dtype=BF16), Grid(pp=2, vpp=2), optimizer="distributed")
    path = tmp_path / "mp_rank_00_001" / "distrib_optim.pt"
    held = torch.load(path, weights_only=False)
    torch.save(held | {2: held[1]}, path)
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.state_tensors == {}
    assert "3 buffers for 2 virtual stages" in catalog.notes[0]


def test_a_distributed_optimizer_without_its_file_is_noted(tmp_path):
    write_legacy(tmp_path, Model(dtype=BF16), Grid(tp=2), optimizer="distributed")
    whole = open_checkpoint(tmp_path).catalog()
    (tmp_path / "mp_rank_01" / "distrib_optim.pt").unlink()
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.state_tensors == {}
    assert "mp_rank_01 has no distrib_optim.pt" in catalog.notes[0]
    assert (catalog.digest == whole.digest, catalog.files_nbytes < whole.files_nbytes) == (False, True)


def test_notes_say_at_which_layouts_megatron_resumes(tmp_path):
    write_legacy(tmp_path / "with", Model(), Grid(), optimizer="plain")
    write_legacy(tmp_path / "without", Model(), Grid())
    notes = [open_checkpoint(tmp_path / name).catalog().notes for name in ("with", "without")]
    assert ["at the same tp, pp and ep only" in " ".join(said) for said in notes] == [True, False]


def test_steps_of_parameter_groups_are_counters(tmp_path):
    write_legacy(tmp_path, Model(dtype=BF16), Grid(), optimizer="distributed")
    state = {item.fqn: item.value for item in open_checkpoint(tmp_path).catalog().state}
    assert state["optimizer.param_groups.0.step"] == 5
