"""What a tokenizer's files say of one thing: honest ways of saying it twice pass, and each way of contradicting names its file."""

import json

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from validators.token_files import judge_token_files

TOKENS = {"<s>": 0, "</s>": 1, "a": 2, "<tool>": 3}


@pytest.fixture
def folder(tmp_path):
    """A tokenizer as transformers saves it, with a post-processor."""
    core = Tokenizer(models.WordLevel(TOKENS, unk_token="a"))
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": ["<tool>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def set_json(path, **fields):
    """Set fields of a JSON file, which need not exist."""
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **fields}))


def found(folder):
    """Return (code, where) of what is found."""
    return [(judgement.code, judgement.where) for judgement in judge_token_files(folder) if judgement is not None]


def test_what_transformers_saves_agrees_with_itself(folder):
    assert found(folder) == []


@pytest.mark.parametrize("inline", ["{{ messages }}", "{{ messages }}\r\n", "{{ messages }}  \n"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json", "processor_config.json"])
def test_template_may_stand_twice_when_only_its_end_differs(name, inline, folder):
    set_json(folder / name, chat_template=inline)
    assert found(folder) == []


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json", "processor_config.json"])
def test_templates_that_differ_are_one_finding(name, folder):
    set_json(folder / name, chat_template="{{ messages[0] }}")
    assert found(folder) == [("tokenizer.chat-templates-differ", "chat_template")]


def test_named_templates_are_held_against_the_default_one(folder):
    other = {"name": "rag", "template": "x"}
    set_json(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "{{ messages }}"}, other])
    assert found(folder) == []
    set_json(folder / "tokenizer_config.json", chat_template=[other])
    assert found(folder) == []


def test_all_files_of_a_slow_and_a_fast_tokenizer_may_lie_side_by_side(folder):
    set_json(folder / "vocab.json", **{token: TOKENS[token] for token in ("<s>", "</s>", "a")})
    set_json(folder / "added_tokens.json", **{"<tool>": 3})
    decoder = {str(index): {"content": token, "special": True} for token, index in TOKENS.items()}
    set_json(folder / "tokenizer_config.json", added_tokens_decoder=decoder, unk_token=None)
    set_json(folder / "special_tokens_map.json", bos_token="<s>", eos_token={"content": "</s>", "lstrip": False}, pad_token="</s>")
    assert found(folder) == []


@pytest.mark.parametrize(
    ("name", "fields", "where"),
    [
        ("vocab.json", {"<s>": 1, "</s>": 0}, "vocab.json"),
        ("added_tokens.json", {"<tool>": 4}, "added_tokens.json"),
        ("added_tokens.json", {"<new>": 2}, "added_tokens.json"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": "<s>"}}}, "tokenizer_config.json: added_tokens_decoder"),
        (
            "tokenizer.json",
            {"post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}},
            "tokenizer.json: post_processor",
        ),
        (
            "tokenizer.json",
            {"post_processor": {"type": "Sequence", "processors": [{"type": "BertProcessing", "sep": ["a", 2], "cls": ["<s>", 3]}]}},
            "tokenizer.json: post_processor",
        ),
    ],
)
def test_each_file_with_another_id_is_named(name, fields, where, folder):
    set_json(folder / name, **fields)
    assert found(folder) == [("tokenizer.ids-differ", where)]


def test_a_sentencepiece_tokenizer_may_shift_its_ids(folder):
    (folder / "tokenizer.json").unlink()
    set_json(folder / "tokenizer_config.json", added_tokens_decoder={"0": {"content": "</s>"}, "1": {"content": "<s>"}})
    assert found(folder) == []


def test_special_tokens_are_compared_where_both_files_name_one(folder):
    set_json(folder / "special_tokens_map.json", bos_token="</s>", eos_token=None, pad_token="a", unk_token="a")
    assert found(folder) == [("tokenizer.specials-differ", "special_tokens_map.json: bos_token")]
    set_json(folder / "tokenizer_config.json", pad_token="</s>")
    assert found(folder)[1:] == [("tokenizer.padding-differs", "special_tokens_map.json: pad_token")]
