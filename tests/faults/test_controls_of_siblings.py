"""What looks odd beside its siblings and is honest: fresh models, grown vocabularies, padding. No word from the weights' own checks."""

import shutil
from dataclasses import replace

import pytest
import torch
import transformers

from tasks.measure import measure
from tests.builders.releases import MODELS, build_tokenizer
from tests.faults.faults_in_weights import assign, both, cast, set_at
from tests.faults.planting import gather, judge_all
from validators.expectation import Evidence
from validators.release import open_release

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BY_THEMSELVES = ("duplicates", "rows", "outliers")


def said_of(folder, sound):
    """Return the codes that the weights' own checks give a folder without any source; each must have run."""
    results = [result for result in judge_all(replace(gather(folder, folder, sound), values=None)) if result.check in BY_THEMSELVES]
    assert [result.check for result in results if result.status in ("passed", "failed") and result.examined] == list(BY_THEMSELVES)
    return [finding.code for result in results for finding in result.findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_as_transformers_starts_it_draws_no_word(name, dtype, sound, tmp_path):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(sound[name].folder))
    model.to(dtype).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    assert said_of(tmp_path, sound[name]) == []


@pytest.mark.parametrize("name", sorted(MODELS))
def test_honest_cast_without_a_source_draws_no_word(name, sound, tmp_path):
    folder = shutil.copytree(sound[name].folder, tmp_path / "release")
    cast(torch.bfloat16, *sound[name].expected.keep_fp32)(folder)
    assert said_of(folder, sound[name]) == []


def test_zero_rows_of_the_padding_token_and_behind_the_vocabulary_draw_no_word(sound, tmp_path):
    folder = shutil.copytree(sound["dense"].folder, tmp_path / "release")
    both(set_at(HEAD, slice(300, 320), 0.0), set_at(EMBEDDING, (0,), 0.0), set_at(HEAD, (0,), 0.0))(folder)
    assert said_of(folder, sound["dense"]) == []


def test_padding_rows_that_repeat_the_first_draw_no_word(sound, tmp_path):
    folder = shutil.copytree(sound["dense"].folder, tmp_path / "release")
    assign(EMBEDDING, lambda t: torch.cat([t[:300], t[:20]]))(folder)
    assert said_of(folder, sound["dense"]) == []


def test_special_tokens_that_share_one_untrained_row_draw_no_word(sound, tmp_path):
    folder = shutil.copytree(sound["dense"].folder, tmp_path / "release")
    assign(EMBEDDING, lambda t: torch.cat([t[:4], t[6:].mean(0, keepdim=True).expand(2, -1), t[6:]]))(folder)
    assert said_of(folder, sound["dense"]) == []


def test_without_a_tokenizer_zeros_at_the_end_are_padding_and_others_a_warning(sound, tmp_path):
    folder = shutil.copytree(sound["dense"].folder, tmp_path / "release")
    for path in folder.glob("*token*"):
        path.unlink()
    set_at(EMBEDDING, slice(256, 320), 0.0)(folder)
    assert said_of(folder, sound["dense"]) == []
    set_at(EMBEDDING, (0,), 0.0)(folder)  # the padding token's
    assert said_of(folder, sound["dense"]) == []
    set_at(EMBEDDING, slice(16, 24), 0.0)(folder)
    assert said_of(folder, sound["dense"]) == ["rows.zero-reserved"]


def test_without_a_family_the_matrices_are_known_by_their_names(sound, tmp_path):
    folder = shutil.copytree(sound["dense"].folder, tmp_path / "release")
    set_at(HEAD, slice(16, 24), 0.0)(folder)
    evidence = replace(gather(folder, folder, sound["dense"]), values=None, expected=None)
    assert [f.code for result in judge_all(evidence) if result.check == "rows" for f in result.findings] == ["rows.zero"]


SMALL = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
GATED = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4}
OTHERS = {"gemma3_text": {}, "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4}, "mamba": {}, "gpt_oss": {}, "qwen3_next": GATED}


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_fresh_model_of_another_kind_draws_no_word_from_its_weights(kind, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SMALL, **OTHERS[kind]))
    model.save_pretrained(tmp_path)
    tensors = measure(tmp_path, plan_path=None, source_roots=(), workers=1).tensors
    results = judge_all(Evidence(open_release(tmp_path), tensors=tensors))
    assert {r.check: [f.code for f in r.findings] for r in results if r.check in BY_THEMSELVES} == {check: [] for check in BY_THEMSELVES}
