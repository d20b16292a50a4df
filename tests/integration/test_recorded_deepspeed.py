"""Saves of the real DeepSpeed, in layouts that are seldom met: weights and moments are the live engine's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.engine.formats.readers import open_checkpoint
from tasks.witnesses.sources import decode_source
from tests.builders.zero import deepspeed_classes
from tests.contract.assembled import assemble, same_bytes
from tests.property.test_zero_layouts import gather

GOLDEN = Path(__file__).parents[1] / "golden/deepspeed"
RECORDED = sorted(path.parent.name for path in GOLDEN.glob("*/expected.safetensors"))


@pytest.mark.parametrize("name", RECORDED)
def test_weights_and_moments_are_the_live_engines(name):
    reader = open_checkpoint(GOLDEN / name / "ckpt")
    stored = decode_source("zero", (Path(reader.catalog().root),))
    truth = load_file(GOLDEN / name / "expected.safetensors")
    assert {key.split("/")[0] for key in truth if "/" in key} == {"exp_avg", "exp_avg_sq"}
    for key, value in truth.items():
        assert same_bytes(assemble(reader, key, tuple(value.shape)), value), key
        assert "/" in key or same_bytes(gather(stored, key, value), value), key


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if "zero3" not in path.name and "autotp" not in path.name))
def test_masters_rounded_are_the_weights_in_the_model_states(name):
    folder = GOLDEN / name / "ckpt"
    with deepspeed_classes():
        module = torch.load(folder / "global_step3/mp_rank_00_model_states.pt", weights_only=False)["module"]
    reader = open_checkpoint(folder)
    stored = decode_source("zero", (Path(reader.catalog().root),))
    assert set(module) == set(reader.catalog().tensors)
    for key, value in module.items():
        master = assemble(reader, key, tuple(value.shape))
        assert same_bytes(master.to(value.dtype), value), key
        assert same_bytes(gather(stored, key, master), master), key
