"""Megatron saves that can be run: a save, the config of the same model, and the logits that transformers makes of its published weights."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.builders.megatron import Grid, Model, config, published, write_legacy

# Arguments of a run that say what it computes; those of `megatron.write_args` say what it holds.
RUN: dict[str, object] = {
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "use_rope_scaling": False,
    "layernorm_epsilon": 1e-5,
    "normalization": "RMSNorm",
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
}
# name → (model of tests.builders.releases, the same model's sizes, how it is cut)
_DENSE = Model(layers=4, hidden=64, heads=8, groups=2, head_dim=8, ffn=96, vocab=320, padded=384)
RUNS: dict[str, tuple[str, Model, Grid]] = {
    "megatron": ("dense", _DENSE, Grid(tp=2, pp=2, vpp=2)),
    "megatron_moe": ("moe", replace(_DENSE, layers=2, ffn=24, experts=4, qk_norm=True), Grid(tp=2, ep=2, etp=1)),
}


def write_run(name: str, folder: Path, release: Path) -> Path:
    """Write the save `name` of RUNS of the weights in a release folder; return the save's folder."""
    _, model, grid = RUNS[name]
    held = json.loads((release / "config.json").read_text())
    args = {**RUN, "rotary_base": held["rope_parameters"]["rope_theta"], "layernorm_epsilon": held["rms_norm_eps"]}
    weights = {n: value for path in sorted(release.glob("*.safetensors")) for n, value in load_file(path).items()}
    write_legacy(folder, model, replace(grid, args=args), weights=weights)
    return folder


def settings(model: Model) -> dict[str, object]:
    """config.json of the model, as a run with RUN computes it."""
    made = config(model)
    made |= {
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "float32",
    }
    return made | ({"num_experts_per_tok": 2, "norm_topk_prob": True} if model.experts else {})


def write_hf(folder: Path, model: Model, **changed: object) -> Path:
    """Write a folder of the published weights and their config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings(model) | changed))
    save_file(published(model), folder / "model.safetensors", {"format": "pt"})
    return folder


def live_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers makes of a folder, in fp32."""
    from transformers import AutoModelForCausalLM

    live = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return live(ids).logits.float()


def prepare(folder: Path, model: Model, grid: Grid, *, golden: bool = True) -> None:
    """Write a save, the config, and the logits of the sound model, as a trainer records them."""
    write_legacy(folder / "ckpt", model, grid)
    write_hf(folder / "hf", model)
    ids = torch.arange(16).reshape(2, 8) % model.vocab
    if golden:
        logits = live_logits(folder / "hf", ids)
        save_file({"input_ids": ids, "logits": logits}, folder / "golden.safetensors", {"computed_in": "fp32"})
    (folder / "hf" / "model.safetensors").unlink()
