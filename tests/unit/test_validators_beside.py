"""What lies beside the weights: what honest folders hold passes without a word, and each file is judged once, by its first row."""

import pickle

import pytest

from tests.builders.headers import codes_of, write_bytes
from validators.expectation import Evidence
from validators.files import examine
from validators.release import open_release

HEADER = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
HONEST = (
    *(
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        "NOTICE",
        "USE_POLICY.md",
        ".gitattributes",
        ".gitignore",
        "config.json",
        "generation_config.json",
    ),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *(
        "tokenizer.model",
        "tokenizer.model.v3",
        "qwen.tiktoken",
        "tekken.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ),
    *("preprocessor_config.json", "original/params.json", "figures/results.png", "figures/latest.jpg", "latest.md", "checkpoint-notes.md"),
    *("params.json", "evaluation/scores.csv", "quantize_config.json", "scheduler_notes.txt", "recipe.yaml", "imatrix.dat"),
    *(".cache/huggingface/download/config.json.incomplete", ".git/hooks/pre-push.sh", "1_Pooling/config.json", "modules.json"),
)


@pytest.fixture
def folder(tmp_path):
    """A folder of one weight file."""
    write_bytes(tmp_path / "model.safetensors", HEADER, bytes(8))
    return tmp_path


def judge(folder, **fields):
    """Return what the check says of a folder."""
    return examine(Evidence(open_release(folder), **fields))


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_folders_hold_passes_without_a_word(name, folder):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")
    assert judge(folder).findings == ()


@pytest.mark.parametrize(
    "head",
    [
        b"MZ is how this story begins.",
        b"\x89PNG\r\n\x1a\n\x00",
        b"\xff\xd8\xff\xe0",
        b"\x0a\x0e\x0a\x05<unk>",
        b"PK\x03\x04" + bytes(60),
        b"#!",
        b"",
    ],
)
def test_text_images_archives_and_vocabularies_are_not_taken_for_programs(head, folder):
    (folder / "NOTICE").write_bytes(head)
    assert judge(folder).findings == ()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [{"a": 1}, [1], (1,), "text", {1, 2}, None, True, 5, 2.5, 2**70])
def test_a_pickle_of_any_protocol_is_known_by_its_first_bytes(value, protocol, folder):
    (folder / "notes.md").write_bytes(pickle.dumps(value, protocol=protocol))
    assert codes_of(judge(folder)) == ["files.pickle"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("optimizer.bin.tmp", "files.half-written"),
        ("tmpab_12xyz", "files.half-written"),
        ("training_args.bin", "files.training-state"),
        ("checkpoint-500/vocab.json", "files.training-state"),
        ("zero_to_fp32.py", "files.training-state"),
        ("other.bin", "files.pickle"),
        ("code/__pycache__/x.cpython-311.pyc", "files.executable"),
        ("tf_model.h5", "files.other-format"),
        ("flax_model.msgpack.index.json", "files.other-format"),
        (".DS_Store", "files.leftover"),
        ("config.json~", "files.leftover"),
    ],
)
def test_a_file_is_judged_once_by_the_first_row_that_fits(name, code, folder):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\x80\x04\x95 whatever it begins with")
    assert codes_of(judge(folder)) == [code]


def test_a_stage_may_keep_its_progress_and_a_release_may_not(folder):
    (folder / ".progress").mkdir()
    (folder / ".progress/model.safetensors.json").write_text("{}")
    assert codes_of(judge(folder, in_stage=True)) == []
    assert codes_of(judge(folder)) == ["files.half-written"]


def test_a_snapshot_of_the_hubs_cache_is_links_to_blobs_and_passes(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("hub") / "models--acme--m"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots/1a52aff"
    snapshot.mkdir(parents=True)
    (folder / "model.safetensors").rename(cache / "blobs/d1")
    (snapshot / "model.safetensors").symlink_to("../../blobs/d1")
    assert codes_of(judge(snapshot)) == []


def test_links_inside_the_folder_pass_and_those_out_of_it_are_named(folder):
    (folder / "README.md").write_text("x")
    (folder / "LICENSE").symlink_to("README.md")
    (folder / "docs").symlink_to("/")
    found = judge(folder).findings
    assert [(f.code, f.where, f.found) for f in found] == [("files.link-outside", "docs", "a link to /")]


def test_code_that_auto_map_names_is_one_warning_that_says_what_is_absent(folder):
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.Own", "AutoTokenizer": ["x--tok.Slow", None]}
    (folder / "config.json").write_text(f'{{"auto_map": {names!r}}}'.replace("'", '"').replace("None", "null"))
    for module in ("modeling_own", "layers_own"):
        (folder / f"{module}.py").write_text("")
    (found,) = judge(folder).findings
    assert (found.code, found.where) == ("files.remote-code", "config.json: auto_map")
    assert found.found == "code of configuration_own, modeling_own, x--tok; configuration_own.py absent"


def test_an_empty_settings_file_is_named_once(folder):
    (folder / "config.json").write_text("")
    (folder / "special_tokens_map.json").write_text("")
    assert [(f.code, f.where) for f in judge(folder).findings] == [
        ("files.zero-length", "config.json"),
        ("files.zero-length", "special_tokens_map.json"),
    ]
