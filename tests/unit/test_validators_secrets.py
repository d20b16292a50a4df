"""The secrets check: what is a credential and what an example of one, what is a path and what a token, and that neither is repeated."""

import json

import pytest

from tests.builders.headers import codes_of
from tests.faults.faults_in_the_folder import CREDENTIALS, HF
from validators.expectation import Evidence
from validators.release import open_release
from validators.secrets import examine


def judge(folder):
    """Return what the check says of a folder."""
    return examine(Evidence(open_release(folder)))


@pytest.mark.parametrize("text", CREDENTIALS.values(), ids=CREDENTIALS)
@pytest.mark.parametrize("name", ["README.md", "tool.py", "chat_template.jinja", "notes/run.yaml", "tokenizer.json", ".env", "id_ed25519"])
def test_a_credential_is_found_in_any_text_and_not_repeated(name, text, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"one\ntwo = '" + text.encode() + b"'\n\xff\xfe")
    (found,) = judge(tmp_path).findings
    assert (found.code, found.where) == ("secrets.credential", f"{name}: line 2")
    assert text[10:] not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "x" * 34,
        "HF_TOKEN=hf_your_token_goes_here",
        "AKIA" + "IOSFODNN7EXAMPLE",
        "sk-" + "X" * 48,
        "sk-estimator-doc-link-container-wide",
        "<div id='sk-container-id-12' class='sk-top-container'>",
        "postgresql://user:password@localhost/db",
        "https://user:<token>@example.org and https://{user}:{token}@host",
        "http://localhost:8000/v1 mail@acme.test https://acme.test:443/a@b",
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----\n",
        "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIEAgAAuTANBgkqhkiG9w0BAQUFADBaMQswCQYDVQQGEwJJ\n",
        "self_" + HF,
        "commit 1a52aff0c5d2f3e4b5a697887766554433221100",
    ],
)
def test_an_example_or_a_mere_likeness_is_no_credential(text, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert judge(tmp_path).findings == ()


@pytest.mark.parametrize(
    "value",
    [
        "/home/ada/run",
        "/root",
        "/mnt/disk/x/y",
        "/lustre/a/b",
        "~/models/x",
        "file:///srv/m",
        "gs://b/k",
        "C:\\Users\\ada",
        "\\\\nas\\models\\x",
    ],
)
def test_a_setting_that_is_a_path_is_a_warning_with_its_field(value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"names": ["ok", value]}}))
    (found,) = judge(tmp_path).findings
    assert (found.code, found.severity, found.where) == ("secrets.machine-path", "warning", "config.json: text_config.names[1]")


@pytest.mark.parametrize(
    "value", ["acme/model-7b", "/", "</s>", "[/INST]", "/no_think", "https://acme.test/a", "a/b/c", "1:1", "modeling_x.XForCausalLM"]
)
def test_a_public_name_or_a_token_is_no_path(value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"name": value}))
    assert judge(tmp_path).findings == ()


def test_words_of_the_model_are_not_taken_for_paths(tmp_path):
    words = {"added_tokens_decoder": {"5": {"content": "/home/ada"}}, "chat_template": "/root", "pad_token": "/mnt/x/y"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"/home/ada/run": 1}}}))
    (tmp_path / "README.md").write_text("copy it to /home/you/models")
    assert judge(tmp_path).findings == ()


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", "[1]"])
def test_settings_that_are_none_are_left_to_the_check_of_files(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    assert codes_of(judge(tmp_path)) == []


def test_a_binary_file_is_no_text(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\0" + HF.encode())
    assert judge(tmp_path).findings == ()


def test_what_git_and_the_hub_keep_is_no_part_of_the_release(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config.txt").write_text(HF)
    assert judge(tmp_path).findings == ()
