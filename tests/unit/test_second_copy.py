"""The second copy: what it holds a release against, what it finds, and when it is not heard."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.measure_copies import measure_copies
from tests.builders.plans import whole, write_plan
from tests.builders.zero import Tensors, Zero, example, write_zero
from tests.builders.zero_parallel import EXPERT, write_experts, write_pipeline

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def _measure(tmp_path: Path, save: Path, released: Tensors, source_format: str = "zero"):
    folder = tmp_path / "release"
    folder.mkdir()
    save_file({name: value.clone() for name, value in released.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    targets = [whole(name, tuple(value.shape), CODES[value.dtype]) for name, value in released.items()]
    plan = write_plan(tmp_path / "plan.json", source_format, save, targets)
    return measure_copies(folder, plan_path=plan, source_roots=(save,), workers=1)


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


@pytest.mark.parametrize("trained_in", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_rounded_are_the_copies(tmp_path, trained_in, dtype):
    save = example(2, 3, dtype=trained_in)
    table, witness = _measure(tmp_path, write_zero(tmp_path, save), _cast(save.truth, dtype))
    comparable = {trained_in, dtype} != {torch.bfloat16, torch.float16}
    assert witness.heard == comparable
    assert set(table["name"]) == ({*save.truth} - {*save.buffers} if comparable else set())  # buffers are held once
    assert table["differing"].sum() == 0


def test_an_element_that_parted_from_its_copy_is_found(tmp_path):
    save = example(2, 2)
    folder = write_zero(tmp_path, save)
    released = dict(save.truth)
    released["embed.weight"] = released["embed.weight"].clone()
    released["embed.weight"][2, 1] += 1
    table, _ = _measure(tmp_path, folder, released)
    row = table.set_index("name").loc["embed.weight"]
    assert (row["differing"], row["first"]) == (1, 7)
    assert table["differing"].sum() == 1


def test_a_change_below_the_copys_precision_is_not_seen(tmp_path):
    save = Zero({"a.weight": torch.ones(4, 4)}, 2)
    released = {"a.weight": save.masters["a.weight"] + 2**-20}
    table, _ = _measure(tmp_path, write_zero(tmp_path, save), released)
    assert table["differing"].sum() == 0


def test_exchanged_experts_are_found(tmp_path):
    experts = [torch.randn(3, 5) for _ in range(4)]
    dense = Zero({"embed.weight": torch.randn(7, 3)}, 2, 4)
    folder = write_experts(tmp_path, dense, [{EXPERT: value} for value in experts], ep_degree=2)
    exchanged = [experts[2], experts[3], experts[0], experts[1]]  # as if rank r had expert-parallel rank 1 - r % 2
    released = {**dense.masters, **{EXPERT.format(n): value for n, value in enumerate(exchanged)}}
    table, witness = _measure(tmp_path, folder, released)
    assert witness.heard
    assert set(table.loc[table["differing"] > 0, "name"]) == {EXPERT.format(n) for n in range(4)}


def test_a_pipelines_layers_are_held_against_their_files(tmp_path):
    stages = [Zero({f"{n}.weight": torch.randn(4, 3)}, 1, 2) for n in (1, 2)]
    layers = {f"{n:02d}": {"weight": stage.masters[f"{n}.weight"]} for n, stage in enumerate(stages, 1)}
    folder = write_pipeline(tmp_path, stages, layers=layers)
    table, _ = _measure(tmp_path, folder, {**stages[0].masters, **{"2.weight": -stages[1].masters["2.weight"]}})
    assert table.set_index("name")["differing"].to_dict() == {"1.weight": 0, "2.weight": 12}


def test_zero3_holds_nothing_twice(tmp_path):
    save = example(3, 2)
    table, witness = _measure(tmp_path, write_zero(tmp_path, save), save.truth)
    assert (len(table), witness.heard, witness.detail) == (0, False, witness.detail)
    assert "no weights beside the masters" in witness.detail


def test_formats_that_never_do_have_no_such_witness(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.zeros(2)}, source / "model.safetensors")
    assert _measure(tmp_path, source, {"a": torch.zeros(2)}, "hf")[1] is None
