"""Folder → model → logits, held against logits that the trainer recorded; offload; and what transformers says of a config."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from tasks.forward import (
    ForwardError,
    Room,
    default_batches,
    describe_architecture,
    first_diverging_layer,
    limits_of,
    logits_of,
    open_model,
    reachable_ids,
    why_not_runnable,
)
from tests.builders.released import GOLDEN, expected_tensors, write_release

CASE = GOLDEN / "accelerate_llama"
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("release"), expected_tensors(CASE), assets=CASE / "hf")


@pytest.fixture(scope="module")
def golden():
    return load_file(CASE / "ref" / "golden.safetensors")


def _write_config(folder, **changed):
    config = json.loads((CASE / "hf" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def test_the_recorded_logits_come_out_again(release, golden, tmp_path):
    found = logits_of(release, golden["input_ids"], memory_limit=PLENTY, offload_folder=tmp_path)
    assert (found.logits - golden["logits"]).abs().max() < 1e-6
    assert found.hidden == ()


def test_what_torch_cannot_run_is_said_of_the_folder(release, tmp_path):
    with (
        open_model(release, Room(PLENTY, tmp_path)) as model,
        pytest.raises(ForwardError, match=r"torch cannot run it.*indices") as refusal,
    ):
        model.run(torch.zeros(1, 4))  # ids that are no integers
    assert refusal.value.where == str(release)


def test_a_forward_gives_the_same_bits_twice(release, golden, tmp_path):
    first, second = (logits_of(release, golden["input_ids"], memory_limit=PLENTY, offload_folder=tmp_path) for _ in range(2))
    assert torch.equal(first.logits, second.logits)


def test_a_model_larger_than_memory_runs_from_disk_with_the_same_logits(release, golden, tmp_path):
    whole = logits_of(release, golden["input_ids"], memory_limit=PLENTY, offload_folder=tmp_path / "unused", hidden=True)
    assert not (tmp_path / "unused").exists()
    parts = logits_of(release, golden["input_ids"], memory_limit=100_000, offload_folder=tmp_path / "offload", hidden=True)
    assert (tmp_path / "offload").is_dir()
    assert torch.equal(whole.logits, parts.logits)
    assert first_diverging_layer(whole.hidden, parts.hidden) == "head"


@pytest.mark.parametrize(
    ("changed", "layer"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("model.layers.0.mlp.up_proj.weight", "layer 0"),
        ("model.layers.1.self_attn.q_proj.weight", "layer 1"),
        ("lm_head.weight", "head"),
    ],
)
def test_the_first_diverging_layer_is_that_of_the_changed_tensor(release, golden, tmp_path, changed, layer):
    tensors = expected_tensors(CASE)
    tensors[changed] = tensors[changed] * 1.01
    faulty = write_release(tmp_path / "faulty", tensors, assets=CASE / "hf")
    first, second = (
        logits_of(folder, golden["input_ids"], memory_limit=PLENTY, offload_folder=tmp_path, hidden=True) for folder in (release, faulty)
    )
    assert first_diverging_layer(first.hidden, second.hidden) == layer


def test_a_parameter_without_values_is_named(tmp_path):
    tensors = expected_tensors(CASE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = write_release(tmp_path, tensors, assets=CASE / "hf")
    with (
        pytest.raises(ForwardError, match=r"no values for model\.layers\.1\.mlp\.up_proj\.weight"),
        open_model(folder, Room(PLENTY, tmp_path)),
    ):
        pass


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    tensors = expected_tensors(CASE)
    tensors["model.norm.weight"] = torch.ones(65)
    folder = write_release(tmp_path, tensors, assets=CASE / "hf")
    with pytest.raises(ForwardError), open_model(folder, Room(PLENTY, tmp_path)):
        pass


def test_transformers_talks_as_before_afterwards(release, golden, tmp_path):
    from transformers.utils import logging as talk

    before = talk.get_verbosity(), talk.is_progress_bar_enabled(), torch.are_deterministic_algorithms_enabled()
    logits_of(release, golden["input_ids"], memory_limit=PLENTY, offload_folder=tmp_path)
    assert (talk.get_verbosity(), talk.is_progress_bar_enabled(), torch.are_deterministic_algorithms_enabled()) == before
    assert logging.getLogger("accelerate.big_modeling").level == logging.NOTSET


def test_an_architecture_lists_the_published_names_and_shapes():
    found = describe_architecture(CASE / "hf")
    assert found.shapes == {name: tuple(value.shape) for name, value in expected_tensors(CASE).items()}
    assert (found.tied, found.renamed) == ((), ())
    assert next(iter(found.shapes)) == "model.embed_tokens.weight"


def test_a_tied_architecture_names_what_is_kept_and_what_is_its_alias():
    found = describe_architecture(GOLDEN / "fsdp2_w4_llama_tied_bf16" / "hf")
    assert found.tied == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_parameters_that_transformers_fuses_or_renames_are_listed(tmp_path):
    folder = _write_config(tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    found = describe_architecture(folder)
    assert "model.layers.0.mlp.experts.gate_up_proj" in found.renamed
    assert "model.layers.0.mlp.gate.weight" in found.renamed
    assert "model.layers.0.self_attn.q_proj.weight" not in found.renamed
    assert found.shapes["model.layers.0.block_sparse_moe.experts.3.w1.weight"] == (102, 64)
    assert not set(found.renamed) & found.shapes.keys()


@pytest.mark.parametrize("changed", [{"model_type": "not_a_model"}, {"model_type": "bert"}])
def test_an_architecture_transformers_does_not_know_says_why(tmp_path, changed):
    folder = _write_config(tmp_path, **changed)
    if changed["model_type"] == "not_a_model":
        assert "refuses" in why_not_runnable(folder)
    else:
        assert why_not_runnable(folder) == ""  # a decoder can be made of it


def test_code_that_a_folder_brings_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    _write_config(tmp_path, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert why_not_runnable(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_config_is_not_runnable(tmp_path):
    assert why_not_runnable(tmp_path)


def test_limits_and_reachable_ids_come_from_config_and_tokenizer():
    assert limits_of(CASE / "hf") == (99, 64)
    assert reachable_ids(CASE / "hf", None) == 99
    tokens = json.loads((CASE / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
    assert reachable_ids(CASE / "hf", CASE / "hf") == 1 + max(tokens.values())


def test_batches_cover_every_id_and_have_a_text_row_where_a_tokenizer_is_given():
    (plain,) = default_batches(CASE / "hf")
    assert set(plain.input_ids.reshape(-1).tolist()) == set(range(99))
    names = [batch.name for batch in default_batches(CASE / "hf", tokenizer_folder=CASE / "hf")]
    assert names[:2] == ["random ids", "text"]


def test_a_chat_template_gives_a_chat_row(tmp_path):
    for file in (CASE / "hf").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    batches = {batch.name: batch for batch in default_batches(tmp_path, tokenizer_folder=tmp_path)}
    assert batches["chat"].input_ids.shape[0] == 1
    assert batches["chat"].input_ids.shape[1] > 1


def test_a_tokenizer_larger_than_the_embedding_is_named(tmp_path):
    for file in (CASE / "hf").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "chat_template.jinja").write_text(max(tokens, key=tokens.__getitem__))
    _write_config(tmp_path, vocab_size=20)
    with pytest.raises(ForwardError, match="beyond the 20 rows"):
        default_batches(tmp_path, tokenizer_folder=tmp_path)
