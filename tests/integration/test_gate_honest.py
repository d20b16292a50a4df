"""Folders that honest tools write are accepted, and what is odd about a folder ends in words, never in a hang or a stale answer."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path

import pytest
import torch
import transformers

from flows.gate import RejectedError, run_gate
from flows.requests import GateRequest
from flows.run import Outcome, PlainRunner
from tests.builders.editing import edit_json, set_fields
from tests.builders.releases import build_release


def gate(folder: Path, **options: object) -> Outcome:
    return run_gate(GateRequest.model_validate({"release": folder, "runs": folder.parent / "runs", **options}), PlainRunner())


def codes(outcome: Outcome) -> set[str]:
    return {f.code for result in outcome.report.results for f in result.findings if f.severity == "error"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_that_transformers_leaves_in_fp32_are_accepted_alone_and_against_the_source(tmp_path, dtype):
    source = build_release("router_bias", tmp_path / "source").folder
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    shutil.copytree(source, tmp_path / "cast", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    model.save_pretrained(tmp_path / "cast")
    assert codes(gate(tmp_path / "cast")) == set()
    outcome = gate(tmp_path / "cast", against=source, skip=["logits=values tell"])
    assert codes(outcome) == set()
    assert {result.check: result.status for result in outcome.report.results}["values"] == "passed"


@pytest.mark.parametrize("head", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_with_another_head_is_said_to_have_one(tmp_path, head):
    source = build_release("dense", tmp_path / "source").folder
    model = getattr(transformers, head).from_pretrained(source)
    shutil.copytree(source, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    model.save_pretrained(tmp_path / "other")
    outcome = gate(tmp_path / "other")
    assert f"{head} is no causal language model" in outcome.verdict.line


def test_fields_of_another_model_in_a_gpt2_config_mean_nothing(tmp_path):
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    config.update({"intermediate_size": 64, "num_key_value_heads": 2})
    torch.manual_seed(3)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    assert codes(gate(tmp_path / "gpt2")) == set()


def test_a_tokenizer_that_changed_between_two_gates_of_one_process_is_read_again(tmp_path):
    assets = build_release("dense", tmp_path / "assets").folder
    release = Path(shutil.copytree(assets, tmp_path / "release"))
    assert gate(release, assets=assets).verdict.green
    edit_json(release / "tokenizer.json", lambda value: value.update(pre_tokenizer={"type": "WhitespaceSplit"}))
    with pytest.raises(RejectedError) as red:
        gate(release, assets=assets)
    assert "tokenizer_drift.encoding" in codes(red.value.outcome)


def test_null_is_said_where_the_models_class_has_another_default(tmp_path):
    fields = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    assets = build_release("dense", tmp_path / "assets").folder
    set_fields(assets / "config.json", **fields, attn_logit_softcapping=50.0)
    release = Path(shutil.copytree(assets, tmp_path / "release"))
    edit_json(release / "config.json", lambda value: value.update(attn_logit_softcapping=None))
    with pytest.raises(RejectedError) as red:
        gate(release, assets=assets, family="none")
    assert "config_drift.forward" in codes(red.value.outcome)


PIPES = ["config.json", "generation_config.json", "model-00001-of-00003.safetensors", "chat_template.jinja", "tokenizer.json", "stray"]


@pytest.fixture(scope="module")
def beside() -> Iterator[Executor]:
    """A process of its own, so that a test can give up waiting."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    yield pool
    pool.shutdown(wait=False, cancel_futures=True)
    for process in active_children():
        process.kill()


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path, name, beside):
    release = build_release("dense", tmp_path / "release").folder
    (release / name).unlink(missing_ok=True)
    os.mkfifo(release / name)
    asked = {"release": release, "runs": tmp_path / "runs"}
    line = beside.submit(verdict_of, asked).result(timeout=120)
    assert line.startswith(("accepted", "not accepted"))


def verdict_of(asked: dict) -> str:
    """Gate a folder and return the verdict line."""
    try:
        return run_gate(GateRequest.model_validate(asked), PlainRunner()).verdict.line
    except RejectedError as red:
        return red.outcome.verdict.line
