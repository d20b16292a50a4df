"""Which tokenizers are written into a GGUF file, and what is said of the others."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tasks.gguf_tokenizer import read_vocabulary
from tests.builders.gguf import LLAMA_CUT, build_bpe

QWEN_CUT = LLAMA_CUT.replace("{1,3}", "")


def _saved(folder: Path, **changed: object) -> Path:
    build_bpe(**changed).save_pretrained(folder)
    return folder


def _edited(folder: Path, edit) -> Path:
    path = _saved(folder) / "tokenizer.json"
    said = json.loads(path.read_text())
    edit(said)
    path.write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(("cut", "ignores", "pre"), [(LLAMA_CUT, True, "llama-bpe"), (QWEN_CUT, False, "qwen2")])
def test_known_cuts_have_llama_cpps_name(cut, ignores, pre, tmp_path):
    found = read_vocabulary(_saved(tmp_path, cut=cut, ignore_merges=ignores), 320)
    assert (found.pre, found.because, len(found.tokens), len(found.types)) == (pre, "", 320, 320)


def test_gpt2s_own_cut_is_byte_levels(tmp_path):
    core = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(tmp_path, 4).tokens == ("a", "b", "ab", "[PAD3]")


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda said: said["model"].update(ignore_merges=False), "no name for how it cuts text"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\s+"}), "no name for how it cuts text"),
        (lambda said: said["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "not cut into bytes last"),
        (lambda said: said.update(pre_tokenizer=None), "not cut into bytes last"),
        (lambda said: said.update(normalizer={"type": "Lowercase"}), "normalizes text .Lowercase."),
        (lambda said: said["model"].update(byte_fallback=True), "BPE with byte fallback"),
        (lambda said: said["model"].update(type="Unigram"), "it is Unigram"),
        (lambda said: said["model"].pop("vocab"), "not as tokenizers writes it"),
        (lambda said: said["added_tokens"].append({"id": 400, "content": "<x>", "special": True}), "ids go up to 400"),
    ],
)
def test_a_tokenizer_that_cannot_be_said_exactly_is_left_out_with_the_reason(edit, word, tmp_path):
    found = read_vocabulary(_edited(tmp_path, edit), 320)
    assert (found.tokens, found.types, found.pre) == ((), (), "")
    assert word.replace(".", "") in found.because.replace("(", "").replace(")", "").replace(".", "")


def test_no_tokenizer_is_named_as_such(tmp_path):
    assert read_vocabulary(None, 4).because == read_vocabulary(tmp_path, 4).because == "no tokenizer.json in --assets"


def test_normalizers_of_the_kind_that_is_named_are_fine(tmp_path):
    tokenizer = build_bpe(cut=QWEN_CUT, ignore_merges=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(tmp_path)
    assert read_vocabulary(tmp_path, 320).pre == "qwen2"


@pytest.mark.parametrize(
    ("template", "before", "after"), [("$A", (), ()), ("<s> $A", (1,), ()), ("$A </s>", (), (2,)), ("<s> <s> $A </s>", (1, 1), (2,))]
)
def test_what_stands_around_a_text_is_what_transformers_puts_there(template, before, after, tmp_path):
    tokenizer = build_bpe()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.save_pretrained(tmp_path)
    found = read_vocabulary(tmp_path, 320)
    assert (found.before, found.after) == (before, after)


@pytest.mark.parametrize(
    ("text", "special", "kind"),
    [
        ("<tool>", False, 4),
        ("<tool>", True, 3),
        ("<|fim|>", False, 3),
        ("<\uff5cfim\uff5c>", False, 3),
        ("<unused7>", False, 3),
        ("<x|>", False, 4),
    ],
)
def test_added_tokens_have_the_type_that_llama_cpps_converter_gives_them(text, special, kind, tmp_path):
    tokenizer = build_bpe()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special)], special_tokens=special)
    tokenizer.save_pretrained(tmp_path)
    found = read_vocabulary(tmp_path, 320)
    at = len(tokenizer) - 1
    assert (found.tokens[at], found.types[at], found.types[at + 1]) == (text, kind, 5)
    assert found.types[:4] == (3, 3, 3, 1)


def test_tokens_that_only_the_settings_list_are_written_too(tmp_path):
    folder = _saved(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"310": {"content": "<late>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = read_vocabulary(folder, 320)
    assert (found.tokens[310], found.types[310], found.tokens[311]) == ("<late>", 3, "[PAD311]")
