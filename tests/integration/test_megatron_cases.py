"""Recorded Megatron runs that were saved in both formats: equal tensors, equal moments, equal releases; masters round to the weights."""

from pathlib import Path

import pytest
import torch

from tasks.engine.formats.reader import CheckpointReader
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.cases import find_case
from tests.contract.assembled import assemble, same_bytes

pytestmark = pytest.mark.cases
PAIRS = [
    ("mg_llama_untied_tp2pp2_legacy", "mg_core0161_llama_tp2pp2_torchdist"),
    ("mg_mixtral_tp2ep2_etp1_legacy", "mg_mixtral_tp2ep2_etp1_torchdist"),
    ("mg_llama_distopt_tp2dp2_legacy", "mg_llama_distopt_tp2dp2_fully"),
]
# The local implementation's names of norms in the legacy format → those torch_dist gives them
NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def _open(name: str) -> CheckpointReader:
    return open_checkpoint(Path(find_case(name)) / "ckpt")


def _in_dist(name: str) -> str:
    return next((name.replace(local, stored) for local, stored in NORMS.items() if name.endswith(local)), name)


@pytest.mark.parametrize(("legacy", "dist"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_both_formats_of_one_run_hold_the_same_tensors_and_moments(legacy, dist):
    one, other = _open(legacy), _open(dist)
    keys = [*one.catalog().tensors, *(key for key in one.catalog().state_tensors if not key.startswith("step/"))]
    assert {_in_dist(key) for key in keys} == {*other.catalog().tensors, *other.catalog().state_tensors}
    assert any(key.startswith("exp_avg_sq/") for key in keys)
    for key in keys:
        shape = one.catalog().tensor(key).shape
        assert shape is not None
        assert same_bytes(assemble(one, key, shape), assemble(other, _in_dist(key), shape)), key


@pytest.mark.parametrize("name", ["mg_llama_distopt_tp2dp2_legacy", "mg_llama_distopt_tp2dp2_fully"])
def test_masters_round_to_the_weights(name):
    reader = _open(name)
    masters = [key for key in reader.catalog().state_tensors if key.startswith("master/")]
    assert {key.removeprefix("master/") for key in masters} == set(reader.catalog().tensors)
    for key in masters:
        weight = key.removeprefix("master/")
        shape = reader.catalog().tensors[weight].shape
        assert shape is not None
        assert same_bytes(assemble(reader, key, shape).to(torch.bfloat16), assemble(reader, weight, shape)), key
