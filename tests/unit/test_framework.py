"""The framework witness: what it hears, what it convicts, and why it stays silent."""

import json
import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from reports.errors import HostilePickleError
from tasks.witnesses.framework import Framework
from tasks.witnesses.hearing import NotHeardError
from tests.builders.released import GOLDEN, expected_tensors, write_release

UNTIED, TIED = GOLDEN / "accelerate_llama", GOLDEN / "fsdp2_w4_llama_tied_bf16"
PLENTY = 1 << 30


def _hear(case, source_format="dcp", root=None, memory_limit=PLENTY):
    return Framework(source_format, (root or case / "ckpt",), case / "hf", memory_limit)


def _save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process saves alone
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("case", [UNTIED, TIED], ids=["untied", "tied"])
def test_its_logits_are_those_recorded_while_the_model_was_live(case):
    golden = load_file(case / "ref" / "golden.safetensors")
    logits, hidden = _hear(case).run(golden["input_ids"])
    assert (logits - golden["logits"]).abs().max() < 1e-6
    assert len(hidden) == 3


@pytest.mark.parametrize(("case", "dtype"), [(UNTIED, torch.float32), (UNTIED, torch.bfloat16), (TIED, torch.bfloat16)])
def test_every_live_parameter_equals_the_release(tmp_path, case, dtype):
    tensors = expected_tensors(case, without_tied_head=case is TIED)
    release = write_release(tmp_path, {name: value.to(dtype) for name, value in tensors.items()}, assets=case / "hf")
    found = _hear(case).compare_parameters(release, dtype)
    assert set(tensors) <= set(found["name"])
    assert found["differing"].sum() == 0


def test_a_changed_parameter_is_named(tmp_path):
    tensors = expected_tensors(UNTIED)
    tensors["model.layers.0.self_attn.v_proj.weight"][3, 4] += 1e-6
    found = _hear(UNTIED).compare_parameters(write_release(tmp_path, tensors, assets=UNTIED / "hf"), torch.float32)
    wrong = found[found["differing"] > 0]
    assert list(wrong["name"]) == ["model.layers.0.self_attn.v_proj.weight"]
    assert list(wrong["first"]) == [3 * 64 + 4]


def test_a_parameter_that_kept_its_precision_in_a_cast_release_is_right(tmp_path):
    tensors = {name: value.bfloat16() for name, value in expected_tensors(UNTIED).items()}
    tensors["model.norm.weight"] = expected_tensors(UNTIED)["model.norm.weight"]
    release = write_release(tmp_path, tensors, assets=UNTIED / "hf")
    assert _hear(UNTIED).compare_parameters(release, torch.bfloat16)["differing"].sum() == 0


def test_two_copies_of_a_tied_tensor_that_disagree_are_named(tmp_path):
    tensors = {name: value.float() for name, value in expected_tensors(TIED, without_tied_head=True).items()}
    diverged = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    root = _save({"model": diverged}, tmp_path / "ckpt")
    found = _hear(TIED, root=root).compare_parameters(write_release(tmp_path / "release", tensors, assets=TIED / "hf"), torch.float32)
    assert list(found[found["differing"] > 0]["name"]) == ["lm_head.weight"]


@pytest.mark.parametrize("top", ["model", "state_dict", ""], ids=["model", "state_dict", "root"])
def test_names_lie_under_a_top_key_or_at_the_root(tmp_path, top):
    tensors = {f"_orig_mod.{name}": value for name, value in expected_tensors(UNTIED).items()}
    root = _save({top: tensors} if top else tensors, tmp_path / "ckpt")
    release = write_release(tmp_path / "release", expected_tensors(UNTIED), assets=UNTIED / "hf")
    assert _hear(UNTIED, root=root).compare_parameters(release, torch.float32)["differing"].sum() == 0


def test_experts_are_compared_under_their_live_names(tmp_path):
    config = json.loads((UNTIED / "hf" / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "hf"), dtype=torch.float32)
    _save({"model": model.state_dict()}, tmp_path / "ckpt")
    model.save_pretrained(tmp_path / "release")
    found = Framework("dcp", (tmp_path / "ckpt",), tmp_path / "hf", PLENTY).compare_parameters(tmp_path / "release", torch.float32)
    assert "model.layers.1.mlp.experts.gate_up_proj" in set(found["name"])
    assert found["differing"].sum() == 0


def test_it_is_silent_about_other_formats():
    with pytest.raises(NotHeardError, match="this one is 'hf'"):
        _hear(UNTIED, source_format="hf")


def test_it_is_silent_when_two_copies_do_not_fit():
    with pytest.raises(NotHeardError, match="two fp32 copies need 613,888"):
        _hear(UNTIED, memory_limit=600_000)


def test_it_is_silent_about_other_names(tmp_path):
    root = _save({"tok_embeddings.weight": torch.ones(99, 64)}, tmp_path / "ckpt")
    with pytest.raises(NotHeardError, match="transformers' own names"):
        _hear(UNTIED, root=root)


def test_it_is_silent_about_other_shapes(tmp_path):
    tensors = expected_tensors(UNTIED) | {"model.norm.weight": torch.ones(65)}
    with pytest.raises(NotHeardError, match=r"shapes differ.*model\.norm\.weight"):
        _hear(UNTIED, root=_save({"model": tensors}, tmp_path / "ckpt"))


def test_it_is_silent_about_values_fp32_cannot_hold(tmp_path):
    tensors = expected_tensors(UNTIED)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    with pytest.raises(NotHeardError, match="fp32 cannot hold"):
        _hear(UNTIED, root=_save({"model": tensors}, tmp_path / "ckpt"))


def test_it_is_silent_when_files_lie_on_other_disks(tmp_path):
    shutil.copytree(TIED / "ckpt", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__2_0.distcp").unlink()
    with pytest.raises(NotHeardError, match=r"__2_0\.distcp"):
        _hear(TIED, root=tmp_path / "ckpt")


def test_a_hostile_metadata_is_refused_before_torch_sees_it(tmp_path):
    class Touch:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(HostilePickleError, match="system"):
        _hear(UNTIED, root=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_torch_gets_the_accepted_bytes_though_the_file_changes_meanwhile(tmp_path, monkeypatch):
    shutil.copytree(UNTIED / "ckpt" / "pytorch_model_fsdp_0", tmp_path / "ckpt")
    from tasks.witnesses import framework

    def swap(*arguments):
        (tmp_path / "ckpt" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
        return build(*arguments)

    build = framework._build
    monkeypatch.setattr(framework, "_build", swap)
    golden = load_file(UNTIED / "ref" / "golden.safetensors")
    logits, _ = _hear(UNTIED, root=tmp_path / "ckpt").run(golden["input_ids"])
    assert (logits - golden["logits"]).abs().max() < 1e-6
