"""The tokenizer check on small hand-written tokenizer files."""

import json

import pytest

from tests.builders.headers import codes_of, planned_release
from validators.expectation import Evidence
from validators.tokenizer import examine

TOKENS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "model_max_length": 10**30}
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    """A folder with a word-level tokenizer of four tokens."""
    write(tmp_path, {"type": "WordLevel", "vocab": TOKENS, "unk_token": "a"})
    return tmp_path


def write(folder, model, settings=SETTINGS, added=()):
    """Write tokenizer.json and tokenizer_config.json."""
    core = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added)}
    steps = dict.fromkeys(["normalizer", "pre_tokenizer", "post_processor", "decoder"])
    (folder / "tokenizer.json").write_text(json.dumps(core | steps | {"model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def judge(folder, *, rows=4, config=None, generation=None):
    """Return the check's outcome for a planned release whose embedding has `rows` rows."""
    fields = {"config": {"vocab_size": rows} | (config or {}), "generation_config": generation or {}, "assets": folder}
    return examine(Evidence(planned_release({EMBEDDING: (rows, 2)}, **fields)))


def added(token, index):
    """Return an added token as tokenizer.json holds it."""
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    return {"id": index, "content": token} | flags


def test_measures_say_how_many_rows_have_no_id(folder):
    outcome = judge(folder, rows=6)
    assert codes_of(outcome) == []
    assert outcome.measured == {"ids": 4, "largest_id": 3, "embedding_rows": 6, "rows_without_id": 2}


def test_added_token_beyond_the_last_row_is_too_big_and_named(folder):
    write(folder, {"type": "WordLevel", "vocab": TOKENS, "unk_token": "a"}, added=[added("<tool>", 4)])
    assert codes_of(judge(folder, rows=5)) == []
    (found,) = judge(folder, rows=4).findings
    assert (found.code, found.found) == ("tokenizer.too-big", "1 ids from 4 to 4: <tool>")


def test_unigram_vocabulary_is_a_list_and_its_places_are_ids(folder):
    write(folder, {"type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["</s>", 0.0], ["a", -1.0]]})
    assert judge(folder).measured["largest_id"] == 2


@pytest.mark.parametrize(
    ("config", "generation", "codes"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": 1}, []),
        ({"eos_token_id": 1}, {"eos_token_id": [3, 1]}, []),
        ({"eos_token_id": 3}, {"eos_token_id": [3, 1]}, []),  # generation stops at both
        ({"eos_token_id": 3}, {}, ["tokenizer.eos-mismatch"]),
        ({"eos_token_id": 1}, {"eos_token_id": 3}, ["tokenizer.eos-mismatch"]),
        ({"eos_token_id": None}, {}, []),
        ({"text_config": {"eos_token_id": 3}}, {}, ["tokenizer.eos-mismatch"]),
        ({"bos_token_id": 2}, {}, ["tokenizer.bos-mismatch"]),
        ({"pad_token_id": -1}, {}, []),  # the old way to say unset
        ({"pad_token_id": 2}, {"pad_token_id": 3}, ["tokenizer.pad-mismatch"]),
        ({"eos_token_id": [1, 4]}, {}, ["tokenizer.special-out-of-range"]),
        ({"bos_token_id": 0}, {"bos_token_id": -1}, ["tokenizer.bos-mismatch", "tokenizer.special-out-of-range"]),
    ],
)
def test_special_ids_must_have_one_in_common_and_a_row(config, generation, codes, folder):
    assert codes_of(judge(folder, config=config, generation=generation)) == codes


@pytest.mark.parametrize(
    ("length", "codes"), [(64, []), (65, ["tokenizer.max-length"]), (10**9, ["tokenizer.max-length"]), (10**9 + 1, []), (None, [])]
)
def test_length_beyond_a_thousand_million_is_unset(length, codes, folder):
    write(folder, {"type": "WordLevel", "vocab": TOKENS, "unk_token": "a"}, SETTINGS | {"model_max_length": length})
    assert codes_of(judge(folder, config={"max_position_embeddings": 64})) == codes


def test_template_may_stand_in_either_file(folder):
    chat = TOKENS | {"<|im_start|>": 4}
    write(folder, {"type": "WordLevel", "vocab": chat, "unk_token": "a"})
    assert codes_of(judge(folder, rows=5)) == ["tokenizer.chat-template-lost"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert codes_of(judge(folder, rows=5)) == []
    (folder / "chat_template.jinja").unlink()
    write(folder, {"type": "WordLevel", "vocab": chat, "unk_token": "a"}, SETTINGS | {"chat_template": "{{ messages }}"})
    assert codes_of(judge(folder, rows=5)) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": "1.0", "model": {"type": "Unheard", "vocab": {}}}'])
def test_tokenizer_that_no_library_loads_is_one_finding(text, folder):
    (folder / "tokenizer.json").write_text(text)
    assert codes_of(judge(folder)) == ["tokenizer.unreadable"]


def test_code_in_the_folder_is_never_run(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "evil.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n")
    settings = SETTINGS | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert codes_of(judge(folder)) == ["tokenizer.unreadable"]
    assert not (folder / "ran").exists()


def sized(content):
    """Return a protobuf field 1 with its length as a varint."""
    low, high = len(content) & 0x7F, len(content) >> 7
    return b"\x0a" + (bytes([low | 0x80, high]) if high else bytes([low])) + content


def piece(text, kind=1):
    """Return one SentencePiece piece as protobuf holds it: text, score, type."""
    return sized(sized(text) + b"\x15" + bytes(4) + b"\x18" + bytes([kind]))


MODEL = piece(b"<s>") + piece(b"</s>", 3) + piece("▁größe".encode()) + piece(b"z" * 300) + b"\x12\x02\x18\x01"


def test_sentencepiece_model_is_read_without_its_library(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(MODEL)
    assert judge(folder).measured["largest_id"] == 3
    assert codes_of(judge(folder, config={"eos_token_id": 1})) == []
    assert codes_of(judge(folder, config={"eos_token_id": 2})) == ["tokenizer.eos-mismatch"]


@pytest.mark.parametrize("damage", [MODEL[:-1], MODEL[:40], b"\x0f" + MODEL, b"\xff" * 20, b"PK\x03\x04 not a model"])
def test_damaged_sentencepiece_model_is_unreadable(damage, folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(damage)
    assert codes_of(judge(folder)) == ["tokenizer.unreadable"]


@pytest.mark.parametrize(
    ("name", "text"), [("vocab.json", json.dumps(TOKENS)), ("vocab.txt", "\n".join(TOKENS))], ids=["vocab.json", "vocab.txt"]
)
def test_older_vocabulary_files_are_read_with_what_was_added(name, text, folder):
    (folder / "tokenizer.json").unlink()
    (folder / name).write_text(text)
    (folder / "added_tokens.json").write_text('{"<tool>": 4}')
    settings = SETTINGS | {"added_tokens_decoder": {"5": {"content": "<call>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert judge(folder, rows=6).measured == {"ids": 6, "largest_id": 5, "embedding_rows": 6, "rows_without_id": 0}
