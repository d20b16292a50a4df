"""`--weights master` of Megatron saves: the optimizer's fp32 masters are released where they can be told, and refused by name where not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flows.export import NotPublishedError, run_export
from flows.gate import run_gate
from flows.requests import ExportRequest, GateRequest
from flows.run import Outcome, PlainRunner, Silent
from reports.errors import RequestError
from tests.builders import megatron_dist, megatron_optimizer
from tests.builders.megatron import Grid, Model, published, write_legacy
from tests.builders.megatron_dist import write_torch_dist
from tests.builders.megatron_runs import settings

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
DENSE = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32, dtype=BF16)
EXPERTS = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=8, vocab=20, padded=32, experts=4, dtype=BF16)
BELOW_BF16 = 1 + 2.0**-11  # a bf16 value times this rounds to the value again
SKIP = ["logits=small numbers", "tokenizer=none here", "duplicates=small numbers", "outliers=small numbers", "rows=small numbers"]
LOCAL = Grid(tp=2, pp=2, args={"transformer_impl": "local"})
Save = Callable[[Path], object]

SAVES: dict[str, tuple[Model, Save]] = {
    "legacy, masters by group": (DENSE, lambda folder: write_legacy(folder, DENSE, Grid(tp=2, pp=2), optimizer="masters")),
    "legacy, one flat vector": (DENSE, lambda folder: write_legacy(folder, DENSE, Grid(tp=2), optimizer="distributed")),
    "legacy, virtual stages": (DENSE, lambda folder: write_legacy(folder, DENSE, Grid(pp=2, vpp=2), optimizer="distributed")),
    "legacy, experts": (EXPERTS, lambda folder: write_legacy(folder, EXPERTS, Grid(tp=2, ep=2), optimizer="distributed")),
    "torch_dist": (DENSE, lambda folder: write_torch_dist(folder, DENSE, Grid(tp=2), optimizer="plain")),
    "torch_dist, buckets": (DENSE, lambda folder: write_torch_dist(folder, DENSE, LOCAL, optimizer="buckets")),
    "torch_dist, core 0.14's fragments": (DENSE, lambda folder: write_torch_dist(folder, DENSE, Grid(tp=2), optimizer="fragments")),
}


@pytest.fixture
def near(monkeypatch):
    """Masters that round to their weights."""
    monkeypatch.setattr(megatron_optimizer, "MASTER", BELOW_BF16)
    monkeypatch.setitem(megatron_dist.SLOTS, "param", BELOW_BF16)


def _export(folder: Path, model: Model, save: Save, **changed: object) -> Outcome:
    save(folder / "ckpt")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(settings(model) | {"dtype": "bfloat16"}))
    asked = {"source": folder / "ckpt", "to": folder / "out", "assets": folder / "hf", "weights": "master", "runs": folder / "runs"}
    return run_export(ExportRequest.model_validate({**asked, "fsync": False, "skip": SKIP, **changed}), PlainRunner(), Silent())


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("name", SAVES)
def test_masters_are_released_and_said_to_be(name, tmp_path):
    model, save = SAVES[name]
    report = _export(tmp_path, model, save).report
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: value.float() * BELOW_BF16 for name, value in published(model).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any("weights are the optimizer's fp32 masters of" in note for note in report.notes)
    heard = {witness.name: witness.heard for witness in report.witnesses if witness.proves == ("bytes",)}
    assert heard == {"second path": name == "torch_dist", "second copy": True}


@pytest.mark.usefixtures("near")
def test_masters_rounded_to_bf16_are_the_stored_weights(tmp_path):
    model, save = SAVES["legacy, one flat vector"]
    _export(tmp_path, model, save, dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in published(model).items())


@pytest.mark.usefixtures("near")
def test_the_gate_holds_a_release_of_masters_against_masters(tmp_path):
    model, save = SAVES["legacy, masters by group"]
    _export(tmp_path, model, save)
    asked = {"release": tmp_path / "out", "against": tmp_path / "ckpt", "assets": tmp_path / "hf", "skip": SKIP, "runs": tmp_path / "runs"}
    report = run_gate(GateRequest.model_validate(asked), PlainRunner()).report
    assert next(result for result in report.results if result.check == "values").status == "passed"


@pytest.mark.parametrize("name", ["legacy, masters by group", "legacy, one flat vector", "torch_dist", "torch_dist, buckets"])
def test_masters_that_do_not_round_to_the_weights_are_not_published(name, tmp_path):
    with pytest.raises(NotPublishedError, match=r"values\.copy-differs"):
        _export(tmp_path, *SAVES[name])


def test_an_optimizer_without_masters_is_refused_by_name(tmp_path):
    with pytest.raises(RequestError, match=r"masters of 27 of 27 tensors cannot be told: decoder\.final_layernorm\.weight"):
        _export(tmp_path, DENSE, lambda folder: write_legacy(folder, DENSE, Grid(tp=2), optimizer="plain"))


@pytest.mark.usefixtures("near")
def test_an_optimizer_whose_order_is_not_known_is_refused_with_the_reason(tmp_path):
    uneven = Grid(args={"ddp_bucket_size": 520})  # a bucket ends behind the final norm
    with pytest.raises(RequestError, match="aligned in one bucket"):
        _export(tmp_path, DENSE, lambda folder: write_legacy(folder, DENSE, uneven, optimizer="distributed"))


def test_weights_stored_in_fp32_are_taken_as_they_are(tmp_path):
    model = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
    report = _export(tmp_path, model, lambda folder: write_legacy(folder, model, Grid(tp=2), optimizer="plain")).report
    assert "weights are stored in fp32, so there are no other masters to take" in report.notes
    assert all(torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], value) for name, value in published(model).items())
