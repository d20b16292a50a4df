"""What holds of a Megatron run that was saved in both formats."""

from pathlib import Path

import torch

from tasks.engine.formats.readers import open_checkpoint
from tests.contract.assembled import assemble, same_bytes

# The local implementation's names of norms in the legacy format → those torch_dist gives them
NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def _in_dist(name: str) -> str:
    return next((name.replace(local, stored) for local, stored in NORMS.items() if name.endswith(local)), name)


def hold_pair(legacy: Path, dist: Path) -> None:
    """Every tensor, moment and master of one save is in the other, bit for bit."""
    one, other = open_checkpoint(legacy), open_checkpoint(dist)
    keys = [*one.catalog().tensors, *(key for key in one.catalog().state_tensors if not key.startswith("step/"))]
    assert {_in_dist(key) for key in keys} == {*other.catalog().tensors, *other.catalog().state_tensors}
    assert any(key.startswith("exp_avg_sq/") for key in keys)
    for key in keys:
        shape = one.catalog().tensor(key).shape
        assert shape is not None
        assert same_bytes(assemble(one, key, shape), assemble(other, _in_dist(key), shape)), key


def hold_masters(save: Path) -> None:
    """Every weight has a master, which rounds to it."""
    reader = open_checkpoint(save)
    masters = [key for key in reader.catalog().state_tensors if key.startswith("master/")]
    assert {key.removeprefix("master/") for key in masters} == set(reader.catalog().tensors)
    for key in masters:
        weight = key.removeprefix("master/")
        shape = reader.catalog().tensors[weight].shape
        assert shape is not None
        assert same_bytes(assemble(reader, key, shape).to(torch.bfloat16), assemble(reader, weight, shape)), key
