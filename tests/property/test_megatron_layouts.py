"""Random Megatron runs, cut by hand: at any layout the published weights come back bit for bit."""

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tasks.engine.families.families import find_family
from tasks.engine.formats.megatron import MegatronReader
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import execute_file
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.witnesses.sources import decode_source
from tests.builders.megatron import Grid, Model, config, published, write_legacy
from tests.contract.assembled import assemble, gather, same_bytes


@st.composite
def runs(draw):
    """Any decoder at any layout that divides it."""
    tp, pp, vpp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    vpp = vpp if pp > 1 else 1
    groups = draw(st.sampled_from([1, 2, 4]))  # fewer than tp: a rank owns no whole KV head
    is_moe = draw(st.booleans())
    ep = draw(st.sampled_from([1, 2])) if is_moe else 1
    stages = tuple(tuple(draw(st.lists(st.integers(0, 2), min_size=pp, max_size=pp))) for _ in range(vpp))
    stages = stages if sum(map(sum, stages)) else ((1,) * pp,) * vpp
    kind = draw(st.sampled_from([{}, {"qkv_bias": True}, {"qk_norm": True}])) if not is_moe else {"experts": 4}
    model = Model(
        layers=sum(map(sum, stages)),
        heads=4,
        groups=groups,
        head_dim=4,
        ffn=8,
        hidden=8,
        vocab=draw(st.integers(9, 16)),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**30)),
        **kind,
    )
    grid = Grid(
        tp,
        pp,
        vpp,
        ep,
        draw(st.sampled_from([None, 1])) if is_moe and tp <= ep else None,
        stages,
        draw(st.booleans()),
        draw(st.sampled_from(["sequential", "te_grouped", "grouped"])),
        draw(st.sampled_from(["", "module.", "module.module."])),
    )
    return model, grid


@given(runs())
def test_global_tensors_and_published_weights_come_back(run):
    model, grid = run
    with tempfile.TemporaryDirectory() as folder:
        save = Path(folder) / "iter_0000007"
        truth = write_legacy(save, model, grid)
        reader = open_checkpoint(save)
        catalog = reader.catalog()
        assert isinstance(reader, MegatronReader)
        assert (catalog.step, set(catalog.tensors)) == (7, set(truth))
        for name, value in truth.items():
            assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        assert _export(reader, model, Path(folder)).keys() == published(model).keys()
        stored = decode_source("megatron", (save,))
        assert set(stored) == set(truth)
        for name, value in truth.items():
            assert same_bytes(gather(stored, name, value), value), name


def _export(reader, model, folder):
    settings = json.loads(json.dumps(config(model)))
    family = find_family(settings)
    dims = family.dims(settings)
    plan = make_plan(reader.catalog(), PlanRequest(family, dims, family.expectation(dims)))
    source = SourceBytes(reader, reader.catalog())
    try:
        check_replicas(plan, source)
        for file in plan.files:
            execute_file(file, source, folder / file.name)
        made = {name: value for file in plan.files for name, value in load_file(folder / file.name).items()}
    finally:
        source.files.close()
    for name, value in published(model).items():
        assert same_bytes(made[name], value), name
    return made
