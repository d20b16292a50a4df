"""Weights written as Megatron's ranks: what a hand-made cut of the same model gives, key by key and bit by bit, and the way back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flows.reshard_megatron import MegatronRequest, write_megatron_save
from reports.errors import RequestError
from tasks.witnesses.native_forward import run_native
from tests.builders.megatron import Grid, Model, published, write_legacy
from tests.builders.megatron_files import chunks_of, differences, load_rank, same_bits
from tests.builders.megatron_runs import live_logits, write_hf

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
DENSE = Model(layers=4, hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
EXPERTS = replace(DENSE, ffn=8, experts=4)
MODELS = (
    DENSE,
    replace(DENSE, qkv_bias=True, tied=True),
    replace(DENSE, groups=4, dtype=torch.bfloat16),
    replace(DENSE, qk_norm=True, tied=True, dtype=torch.float16),
    EXPERTS,
    replace(EXPERTS, shared=12, qkv_bias=True, dense=(0, 2)),
    replace(EXPERTS, qk_norm=True, dense=(1,)),
)
# (pp, vpp) → layers per virtual and pipeline stage, where they are uneven; stages without layers too
UNEVEN = {(2, 1): ((1, 3),), (2, 2): ((2, 0), (1, 1)), (4, 1): ((0, 2, 1, 1),)}
ROOM = 8  # --make-vocab-size-divisible-by


@st.composite
def grids(draw) -> tuple[Model, Grid]:
    model = draw(st.sampled_from(MODELS))
    pp = draw(st.sampled_from((1, 2, 4)))
    vpp = draw(st.sampled_from((1, 2))) if pp in (2,) else 1
    tp = draw(st.sampled_from((1, 2, 4)))
    ep = draw(st.sampled_from((1, 2, 4))) if model.experts else 1
    etp = draw(st.sampled_from((1, tp))) if model.experts else tp
    stages = draw(st.sampled_from((None, UNEVEN.get((pp, vpp)))))
    padded = -(-model.vocab // (ROOM * tp)) * ROOM * tp
    return replace(model, padded=padded), Grid(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, stages=stages, fused_norms=draw(st.booleans()))


def _write(source: Path, folder: Path, grid: Grid, *, assets: Path | None = None, family: str = "auto", spec: str | None = None) -> Path:
    folder.mkdir()
    ranks = {"tp": grid.tp, "pp": grid.pp, "ep": grid.ep, "etp": grid.expert_tp, "vpp": grid.vpp}
    spec = spec or ("transformer_engine" if grid.fused_norms else "local")
    layers = tuple(count for stage in grid.stages or () for count in stage)
    write_megatron_save(MegatronRequest(source, (), None, "", assets, family, ranks, (), spec, ROOM, layers), folder)
    return folder / "release"


def _without_extra_states(save: Path, other: Path) -> list[str]:
    # The hand-made files name them in fewer places.
    return [line for line in differences(save, other, DENSE.vocab) if not ("keys [" in line and "_extra_state" in line)]


def _weights(chunk: dict[str, object]) -> set[str]:
    return {name for name in chunk if not name.endswith("_extra_state")}


@SLOW
@given(grids())
def test_ranks_hold_what_a_cut_by_hand_gives_them(tmp_path_factory, drawn):
    model, grid = drawn
    tmp_path = tmp_path_factory.mktemp("ranks")
    made = _write(write_hf(tmp_path / "hf", model), tmp_path / "made", grid)
    write_legacy(tmp_path / "theirs", model, grid)
    assert _without_extra_states(made, tmp_path / "theirs") == []
    for folder in (tmp_path / "theirs").iterdir():
        ours, theirs = chunks_of(made / folder.name), chunks_of(folder)
        assert [_weights(ours[key]) for key in sorted(ours)] == [_weights(theirs[key]) for key in sorted(theirs)]


@SLOW
@given(grids(), grids())
def test_from_one_layout_to_another_and_back_no_bit_is_lost(tmp_path_factory, drawn, other):
    model, grid = drawn
    assume(model.experts or other[1].ep == 1)
    tmp_path = tmp_path_factory.mktemp("ranks")
    hf = write_hf(tmp_path / "hf", model)
    first = _write(hf, tmp_path / "first", Grid())
    second = _write(first, tmp_path / "second", replace(other[1], ep=grid.ep, etp=None), assets=hf)
    back = _write(second, tmp_path / "back", Grid(), assets=hf)
    assert differences(first, back, model.padded) == []
    assert same_bits(_published_of(second, hf), published(model))


def _published_of(save: Path, hf: Path) -> dict[str, torch.Tensor]:
    from tasks.engine.families.families import find_family
    from tasks.engine.formats.readers import open_checkpoint
    from tasks.engine.planning.planner import PlanRequest, make_plan
    from tasks.engine.writing.execute import execute_file
    from tasks.engine.writing.source_bytes import SourceBytes
    from tasks.reshard import read_config

    config = read_config(hf)
    family = find_family(config)
    assert family is not None
    dims = family.dims(config)
    reader = open_checkpoint(save)
    plan = make_plan(reader.catalog(), PlanRequest(family, dims, family.expectation(dims)))
    (file,) = plan.files
    execute_file(file, SourceBytes(reader, reader.catalog()), save / "whole.safetensors")
    return load_file(save / "whole.safetensors")


@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
def test_the_ranks_compute_what_the_published_weights_do(model, tmp_path):
    hf = write_hf(tmp_path / "hf", model)
    ids = torch.arange(16).reshape(2, 8) % model.vocab
    grid = Grid(tp=2, pp=2, ep=2 if model.experts else 1)
    made = _write(hf, tmp_path / "made", grid)
    found = run_native("megatron", (made,), [ids]).logits[0][..., : model.vocab]
    expected = live_logits(hf, ids)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_padding_rows_are_zero_and_args_say_how_it_is_cut(tmp_path):
    made = _write(write_hf(tmp_path / "hf", DENSE), tmp_path / "made", Grid(tp=2, pp=2, vpp=2))
    assert (tmp_path / "made" / "latest_checkpointed_iteration.txt").read_text() == "release"
    held = load_rank(made / "mp_rank_01_000")
    embedding = held["model0"]["embedding.word_embeddings.weight"]  # type: ignore[index]
    assert embedding.shape == (16, 16)
    assert int(embedding[4:].count_nonzero()) == 0
    args = vars(held["args"])  # type: ignore[arg-type]
    stated = ("tensor_model_parallel_size", "virtual_pipeline_model_parallel_size", "padded_vocab_size", "params_dtype", "num_query_groups")
    assert [args[name] for name in stated] == [2, 2, 32, torch.float32, 2]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (Grid(pp=2, stages=((1, 3),)), {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}),
        (Grid(pp=4, stages=((0, 2, 1, 1),)), {"pipeline_model_parallel_layout": "E|tt|t|tL"}),
        (Grid(pp=2, vpp=2, stages=((2, 0), (1, 1))), {"pipeline_model_parallel_layout": "Ett||t|tL"}),
        (Grid(pp=2, stages=((2, 2),)), {"decoder_first_pipeline_num_layers": None, "pipeline_model_parallel_layout": None}),
    ],
)
def test_args_say_how_many_layers_uneven_stages_have(grid, said, tmp_path):
    made = _write(write_hf(tmp_path / "hf", DENSE), tmp_path / "made", grid)
    args = vars(load_rank(made / "mp_rank_00_000")["args"])  # type: ignore[arg-type]
    assert {name: args.get(name) for name in said} == said


@pytest.mark.parametrize(
    ("model", "grid", "said"),
    [
        (DENSE, Grid(pp=2, stages=((1, 2),)), "2 stages with 3 layers; the model has 4"),
        (DENSE, Grid(pp=2, stages=((1, 2, 1),)), "3 stages with 4 layers; .* the run 2 stages"),
        (DENSE, Grid(pp=3), "4 layers do not divide over 3 stages"),
        (DENSE, Grid(vpp=2), "more than one pipeline stage"),
        (DENSE, Grid(ep=2), "no experts"),
        (EXPERTS, Grid(ep=3), "4 experts do not divide"),
        (DENSE, Grid(tp=3), "4 heads and 2 KV heads do not divide over 3 ranks"),
        (replace(DENSE, ffn=22), Grid(tp=4), "22 rows of .* do not divide over 4 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(model, grid, said, tmp_path):
    hf = write_hf(tmp_path / "hf", model)
    with pytest.raises(RequestError, match=said):
        _write(hf, tmp_path / "made", grid)


def test_positions_that_megatron_has_no_argument_for_are_refused(tmp_path):
    yarn = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}
    hf = write_hf(tmp_path / "hf", DENSE, rope_parameters=yarn)
    with pytest.raises(RequestError, match="no arguments for rope_type 'yarn'"):
        _write(hf, tmp_path / "made", Grid())
