"""Random Megatron runs, cut by hand: at any layout the published weights come back bit for bit."""

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tasks.engine.families.families import find_family
from tasks.engine.formats.megatron import MegatronReader
from tasks.engine.formats.megatron_dist import MegatronDistReader
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import execute_file
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.witnesses.sources import decode_source
from tests.builders.megatron import Grid, Model, config, published, write_legacy
from tests.builders.megatron_dist import write_torch_dist
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
    layers = sum(map(sum, stages))
    shared = {"experts": 4, "shared": 8, "qkv_bias": True, "dense": tuple(draw(st.sets(st.integers(0, layers - 1), max_size=2)))}
    kind = draw(st.sampled_from([{"experts": 4}, shared] if is_moe else [{}, {"qkv_bias": True}, {"qk_norm": True}]))
    model = Model(
        layers=layers,
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


@settings(max_examples=30)
@given(runs())
def test_both_formats_of_equal_weights_make_equal_files(run):
    model, grid = run
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_legacy(folder / "legacy", model, grid)
        is_mixed = bool(model.dense)  # layers of two kinds are not stacked
        truth = write_torch_dist(folder / "dist", model, Grid(grid.tp, etp=grid.etp), stacked=not is_mixed)
        reader = open_checkpoint(folder / "dist")
        assert isinstance(reader, MegatronDistReader)
        stored = decode_source("megatron_dist", (folder / "dist",))
        assert set(reader.catalog().tensors) == set(stored) == set(truth)
        for name, value in truth.items():
            assert same_bytes(gather(stored, name, value), value), name
        made = []
        for name in ("legacy", "dist"):
            (folder / f"{name}_out").mkdir()
            _export(open_checkpoint(folder / name), model, folder / f"{name}_out")
            made.append({path.name: path.read_bytes() for path in (folder / f"{name}_out").iterdir()})
        assert made[0] == made[1]


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
