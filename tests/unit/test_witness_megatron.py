"""The second decoding of Megatron's rank files: old names of arguments mean what they meant."""

from dataclasses import replace

import pytest
import torch

from tasks.witnesses.megatron import decode_megatron
from tests.builders.megatron import Grid, Model, write_legacy
from tests.builders.megatron_files import same_bits

MODEL = Model(layers=2, hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
OLD = {
    "tp": ({"tensor_model_parallel_size": None, "model_parallel_size": 2}, MODEL, Grid(tp=2)),
    "layers": ({"num_layers": None, "encoder_num_layers": 2}, MODEL, Grid(tp=2, pp=2)),
    "experts": ({"num_experts": None, "num_moe_experts": 4}, replace(MODEL, ffn=8, experts=4), Grid(tp=2, ep=2)),
}


@pytest.mark.parametrize("name", OLD)
def test_arguments_under_their_old_names_are_understood(name, tmp_path):
    args, model, grid = OLD[name]
    truth = write_legacy(tmp_path, model, replace(grid, args=args))
    found = {}
    for key, boxes in decode_megatron((tmp_path,)).items():
        whole = torch.full(truth[key].shape, torch.nan)
        for stored in boxes:
            with stored.open() as read:
                at = tuple(slice(a, a + n) for a, n in zip(stored.box.offset, stored.box.shape, strict=True))
                whole[at] = read((0,) * len(stored.box.shape), stored.box.shape)
        found[key] = whole
    assert same_bits(found, truth)
