"""Megatron's own forward from the ranks' tensors gives what the trainer recorded, and what transformers makes of published weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.witnesses.boxes import Box
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.native_forward import run_native
from tasks.witnesses.native_shards import Shard, join_halves
from tasks.witnesses.sources import SafetensorsBox
from tests.builders.cases import find_case
from tests.builders.megatron import Grid, Model, edit_rank, write_legacy
from tests.builders.megatron_dist import write_torch_dist
from tests.builders.megatron_runs import RUN, live_logits, write_hf

SMALL = Model(layers=4, hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
EXPERTS = replace(SMALL, ffn=8, experts=4)
MODELS = {
    "llama": SMALL,
    "llama, one KV head": replace(SMALL, groups=1),
    "llama, wide heads": replace(SMALL, head_dim=8),
    "qwen2": replace(SMALL, qkv_bias=True, tied=True),
    "qwen3": replace(SMALL, qk_norm=True),
    "mixtral": EXPERTS,
    "qwen2_moe": replace(EXPERTS, shared=12, qkv_bias=True, dense=(0,)),
    "qwen3_moe": replace(EXPERTS, qk_norm=True, dense=(1,)),
}
GRIDS = {
    "whole": Grid(),
    "tp 2": Grid(tp=2, fused_norms=True),
    "tp 2, pp 2, vpp 2": Grid(tp=2, pp=2, vpp=2, prefix="module."),
    "uneven stages": Grid(pp=3, stages=((1, 2, 1),)),
}
EXPERT_GRIDS = {
    "ep 2": Grid(ep=2, experts_as="te_grouped"),
    "tp 2, ep 2, expert-tp 1": Grid(tp=2, ep=2, etp=1),
    "tp 2, ep 2, grouped": Grid(tp=2, ep=2, experts_as="grouped"),
}
IDS = torch.arange(24).reshape(3, 8) * 7 % 20


def _run(folder: Path, model: Model, grid: Grid) -> torch.Tensor:
    write_legacy(folder / "ckpt", model, replace(grid, args={**RUN, **grid.args}))
    native = run_native("megatron", (folder / "ckpt",), [IDS, IDS[:1, :5]])
    assert torch.allclose(native.logits[1], native.logits[0][:1, :5], rtol=1e-4, atol=1e-4)
    return native.logits[0][..., : model.vocab]


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, grid) for name in MODELS for grid in GRIDS.values() if grid.stages is None or not MODELS[name].experts),
        *((name, grid) for name in MODELS for grid in EXPERT_GRIDS.values() if MODELS[name].experts),
    ],
)
def test_every_family_gives_what_transformers_gives(name, grid, tmp_path):
    found = _run(tmp_path, MODELS[name], grid)
    assert _is_near(found, live_logits(write_hf(tmp_path / "hf", MODELS[name]), IDS))


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "qwen2_moe"])
def test_torch_dist_gives_what_transformers_gives(name, tmp_path):
    write_torch_dist(tmp_path / "ckpt", MODELS[name], Grid(tp=2, args=RUN), stacked=not MODELS[name].dense)
    native = run_native("megatron_dist", (tmp_path / "ckpt",), [IDS])
    expected = live_logits(write_hf(tmp_path / "hf", MODELS[name]), IDS)
    assert _is_near(native.logits[0][..., : expected.shape[-1]], expected)


@pytest.mark.parametrize(
    ("args", "config"),
    [
        ({"rotary_base": 500000}, {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
            {
                "rope_parameters": {
                    **{"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                    "original_max_position_embeddings": 8192,
                }
            },
        ),
        (
            {"rotary_seq_len_interpolation_factor": 4},
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}},
        ),
        ({"layernorm_epsilon": None, "norm_epsilon": 0.5}, {"rms_norm_eps": 0.5}),
    ],
    ids=["theta", "llama3", "linear", "an eps under its old name"],
)
def test_what_args_say_of_the_arithmetic_is_followed(args, config, tmp_path):
    wide = replace(SMALL, head_dim=16)  # so many frequencies that Llama 3.1 slows some of them down
    found = _run(tmp_path, wide, Grid(tp=2, args=args))
    assert _is_near(found, live_logits(write_hf(tmp_path / "hf", wide, **config), IDS))
    assert not _is_near(found, live_logits(write_hf(tmp_path / "plain", wide), IDS))


def test_experts_weighted_before_they_are_chosen(tmp_path):
    model = MODELS["qwen3_moe"]
    found = _run(tmp_path, model, Grid(ep=2, args={"moe_router_pre_softmax": True}))
    assert _is_near(found, live_logits(write_hf(tmp_path / "hf", model, norm_topk_prob=False), IDS))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"multi_latent_attention": True}, "latent attention"),
        ({"window_size": (4, 0)}, "sliding windows"),
        ({"moe_router_score_function": "sigmoid"}, "router without softmax"),
        ({"position_embedding_type": "yarn"}, "other positions"),
        ({"layernorm_epsilon": None}, "layernorm_epsilon"),
        ({"position_embedding_type": None}, "do not say position_embedding_type"),
        ({"normalization": None}, "do not say normalization"),
    ],
)
def test_what_it_was_not_taught_keeps_it_silent(args, said, tmp_path):
    with pytest.raises(NotHeardError, match=said):
        _run(tmp_path, SMALL, Grid(args=args))


@pytest.mark.parametrize("name", ["decoder.layers.0.self_attention.gate.weight", "decoder.layers.1.cross_attention.linear_q.weight"])
def test_a_parameter_it_does_not_use_keeps_it_silent(name, tmp_path):
    write_legacy(tmp_path, SMALL, Grid(args=RUN))
    edit_rank(tmp_path / "mp_rank_00", lambda held: held["model"].update({name: torch.ones(4)}))
    with pytest.raises(NotHeardError, match="does not use"):
        run_native("megatron", (tmp_path,), [IDS])


def test_another_format_and_tensors_that_do_not_fit_keep_it_silent(tmp_path):
    with pytest.raises(NotHeardError, match="'dcp'"):
        run_native("dcp", (tmp_path,), [IDS])
    write_legacy(tmp_path, SMALL, Grid(args=RUN))
    edit_rank(
        tmp_path / "mp_rank_00", lambda held: held["model"].update({"decoder.layers.0.self_attention.linear_proj.weight": torch.ones(3, 3)})
    )
    with pytest.raises(NotHeardError, match="do not run"):
        run_native("megatron", (tmp_path,), [IDS])


def test_halves_of_a_gated_linear_that_are_stored_apart_are_one(tmp_path):
    held = {
        "mlp.linear_fc1.weight_w": torch.rand(2, 3),
        "mlp.linear_fc1.weight_v": torch.rand(2, 3),
        "mlp.linear_fc2.weight": torch.rand(3, 2),
    }
    save_file(held, tmp_path / "held.safetensors")
    boxes = {n: (Shard((SafetensorsBox(tmp_path / "held.safetensors", n, Box((0, 0), tuple(v.shape))),)),) for n, v in held.items()}
    made = dict(join_halves(boxes))
    assert made.keys() == {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    expected = torch.cat([held["mlp.linear_fc1.weight_w"], held["mlp.linear_fc1.weight_v"]])
    assert torch.equal(made["mlp.linear_fc1.weight"][0].read(), expected)


@pytest.mark.cases
@pytest.mark.parametrize(
    "name",
    [
        "mg_core0161_llama_tp2pp2_torchdist",
        "mg_gpt2_tied_tp2pp2_legacy",
        "mg_llama_untied_tp2pp2_legacy",
        "mg_llama_untied_vpp2pp2_legacy",
        "mg_mixtral_pp2ep2_legacy",
        "mg_mixtral_tp2ep2_etp1_legacy",
        "mg_mixtral_tp2ep2_etp1_torchdist",
        "mg_qwen2_tied_tp2pp2_torchdist",
        "mg_qwen3_tp2_torchdist",
    ],
)
def test_it_gives_what_the_trainer_recorded(name):
    case = find_case(name)
    (folder,) = (case / "ckpt").glob("iter_*")
    golden = load_file(case / "ref" / "golden.safetensors")
    native = run_native("megatron" if "legacy" in name else "megatron_dist", (folder,), [golden["input_ids"]])
    logits = golden["logits"]
    assert float((native.logits[0][..., : logits.shape[-1]] - logits).abs().max()) <= 1e-4
