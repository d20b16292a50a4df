"""DeepSeek-V3's multi-token prediction layers: from Megatron's names to the published ones and back, and at the gate.

The last layer of a tiny model stands for one: under `mtp.layers.0` in rank files made by hand, as `model.layers.{num_hidden_layers}` in a
published folder. No forward pass of Megatron is compared.
"""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.export import run_export
from flows.gate import RejectedError, run_gate
from flows.requests import ExportRequest, GateRequest
from flows.reshard_megatron import MegatronRequest, write_megatron_save
from flows.run import PlainRunner, Silent
from reports.errors import ReplicaError
from reports.model import Report
from tests.builders.megatron import Tensors, saved_bytes
from tests.builders.megatron_files import chunks_of, same_bits
from tests.integration.test_megatron_latent import EXPERTS, LAYERS, _model, _published, _rank

MODEL_LAYERS = LAYERS - 1
AT = f"model.layers.{MODEL_LAYERS}"
COPIES = {f"{AT}.embed_tokens.weight": "model.embed_tokens.weight", f"{AT}.shared_head.head.weight": "lm_head.weight"}
SKIP = [f"{check}=small numbers" for check in ("tokenizer", "duplicates", "outliers", "rows", "logits")]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A published folder whose config promises one prediction layer, which it holds, with its copies."""
    _, model = _model(12)
    held = _published(model, tmp_path / "hf")
    held |= {f"{AT}.{name}.weight": torch.randn(16) for name in ("enorm", "hnorm", "shared_head.norm")}
    held |= {f"{AT}.eh_proj.weight": torch.randn(16, 32), **{copy: held[of].clone() for copy, of in COPIES.items()}}
    save_file(held, tmp_path / "hf/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config |= {"num_hidden_layers": MODEL_LAYERS, "num_nextn_predict_layers": 1, "dtype": "float32"}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    return tmp_path / "hf"


def _stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def _predicting_rank(held: Tensors, tp: int, inner: str) -> Tensors:
    before, to = f"decoder.layers.{MODEL_LAYERS}.", "mtp.layers.0."
    made = {name.replace(before, f"{to}{inner}."): value for name, value in _rank(held, tp).items()}
    made |= {f"{to}{name}.weight": held[f"{AT}.{name}.weight"] for name in ("enorm", "hnorm")}
    made[f"{to}final_layernorm.weight"] = held[f"{AT}.shared_head.norm.weight"]
    made[f"{to}eh_proj.weight"] = held[f"{AT}.eh_proj.weight"].chunk(2)[tp]
    return {name: value.clone() for name, value in made.items()}


def _write_ranks(folder: Path, held: Tensors, inner: str) -> None:
    args = {"tensor_model_parallel_size": 2, "num_layers": MODEL_LAYERS, "num_experts": EXPERTS, "multi_latent_attention": True}
    args |= {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_pos_emb_head_dim": 4, "moe_ffn_hidden_size": 10, "hidden_size": 16, "swiglu": True}
    for tp in range(2):
        rank = folder / f"mp_rank_{tp:02d}"
        rank.mkdir(parents=True)
        saved = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "model": _predicting_rank(held, tp, inner)}
        (rank / "model_optim_rng.pt").write_bytes(saved_bytes(saved))


def _export(source: Path, base: Path, assets: Path) -> Report:
    asked = {"source": source, "to": base / "out", "assets": assets, "dtype": "fp32", "fsync": False, "skip": SKIP, "runs": base / "runs"}
    return run_export(ExportRequest.model_validate(asked), PlainRunner(), Silent()).report


def _judge(release: Path, base: Path, against: Path | None = None) -> Report:
    asked = {"release": release, "against": against, "skip": [*SKIP, "manifest=made by hand"], "runs": base / "runs"}
    return run_gate(GateRequest.model_validate(asked), PlainRunner()).report


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_megatrons_prediction_layers_are_published(inner, folder, tmp_path):
    held = _stored(folder)
    _write_ranks(tmp_path / "ckpt", held, inner)
    _export(tmp_path / "ckpt", tmp_path, folder)
    assert same_bits(_stored(tmp_path / "out"), {name: value for name, value in held.items() if name not in COPIES})
    assert _judge(tmp_path / "out", tmp_path, tmp_path / "ckpt").verdict().green


def test_a_published_folder_is_exported_with_its_copies(folder, tmp_path):
    _export(folder, tmp_path, folder)
    assert same_bits(_stored(tmp_path / "out"), _stored(folder))


@pytest.mark.parametrize("pp", [1, 2])
def test_published_prediction_layers_are_written_as_ranks(pp, folder, tmp_path):
    held, to = _stored(folder), tmp_path / "made"
    to.mkdir()
    ranks = {"tp": 2, "pp": pp, "ep": 1, "etp": 2, "vpp": 1}
    write_megatron_save(MegatronRequest(folder, (), None, "", None, "auto", ranks, (), "transformer_engine", 10), to)
    for tp in range(2):
        stages = [chunks_of(path)["model"] for path in sorted((to / "release").glob(f"mp_rank_{tp:02d}*"))]
        found = {n: v for stage in stages for n, v in stage.items() if n.startswith("mtp.") and v is not None}
        expected = {n: v for n, v in _predicting_rank(held, tp, "transformer_layer").items() if n.startswith("mtp.")}
        single = {_one_by_one(name): value for name, value in expected.items()}
        assert same_bits(found, single)
        assert all("embedding.word_embeddings.weight" in stage for stage in stages)  # prediction layers embed on the last stage
    (tmp_path / "runs").mkdir()
    _export(to, tmp_path, folder)
    assert same_bits(_stored(tmp_path / "out"), {name: value for name, value in held.items() if name not in COPIES})


def _one_by_one(name: str) -> str:
    before, found, rest = name.partition(".mlp.experts.")
    linear, _, expert = rest.rpartition(".weight")
    return f"{before}{found}local_experts.{expert}.{linear}.weight" if found else name


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_drifted_is_not_lost_silently(copy, folder, tmp_path):
    held = _stored(folder)
    held[copy][3] += 1
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    ranks = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "vpp": 1}
    with pytest.raises(ReplicaError, match=rf"^{copy}: row 3 differs from {COPIES[copy]}"):
        write_megatron_save(MegatronRequest(folder, (), None, "", None, "auto", ranks), tmp_path)


def test_the_gate_knows_the_layers_that_a_config_promises(folder, tmp_path):
    assert _judge(folder, tmp_path).verdict().green


def test_the_gate_accepts_a_release_that_left_them_out(folder, tmp_path):
    held = {name: value for name, value in _stored(folder).items() if not name.startswith(f"{AT}.")}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    assert _judge(folder, tmp_path).verdict().green


@pytest.mark.parametrize("lost", [f"{AT}.hnorm.weight", f"{AT}.self_attn.o_proj.weight", f"{AT}.mlp.experts.2.up_proj.weight"])
def test_the_gate_names_what_a_prediction_layer_lost(lost, folder, tmp_path):
    held = _stored(folder)
    del held[lost]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RejectedError) as rejected:
        _judge(folder, tmp_path)
    found = {(finding.code, finding.where) for result in rejected.value.outcome.report.results for finding in result.findings}
    assert ("inventory.missing", lost) in found
