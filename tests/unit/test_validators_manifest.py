"""The manifest check on hand-made folders: what it hashes itself, what it leaves to the digests given, what a stage may lack."""

import json

import pytest

from tests.builders.headers import codes_of, write_bytes
from tests.faults.faults_in_the_folder import sign
from validators.check import run
from validators.expectation import Evidence
from validators.manifest import CHECK, examine
from validators.release import open_release

HEADER = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


@pytest.fixture
def folder(tmp_path):
    """A signed release of two files."""
    write_bytes(tmp_path / "model.safetensors", HEADER, bytes(8))
    (tmp_path / "config.json").write_text("{}")
    sign(tmp_path)
    return tmp_path


def judge(folder, **fields):
    """Return what the check says of a folder."""
    return examine(Evidence(open_release(folder), **fields))


def test_weights_are_held_against_the_digests_given_and_small_files_are_hashed(folder):
    assert judge(folder).measured == {"listed": 2, "hashed": 1}
    listed = json.loads((folder / "shardwright.json").read_text())["files"]["model.safetensors"]["sha256"]
    assert codes_of(judge(folder, digests={"model.safetensors": listed})) == []
    assert codes_of(judge(folder, digests={"model.safetensors": "0" * 64})) == ["manifest.digest"]


def test_a_weight_file_that_cannot_be_parsed_is_still_held_against_its_size(folder):
    (folder / "model.safetensors").write_bytes(b"")
    assert codes_of(judge(folder)) == ["manifest.size"]


def test_a_stage_has_no_marker_yet_and_keeps_its_progress(folder):
    (folder / "shardwright.committed").unlink()
    (folder / ".progress").mkdir()
    (folder / ".progress/model.safetensors.json").write_text("{}")
    assert codes_of(judge(folder, in_stage=True)) == []
    assert codes_of(judge(folder)) == ["manifest.uncommitted", "manifest.unlisted"]


def test_what_git_and_the_hub_add_is_not_unlisted(folder):
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".cache/huggingface/download").mkdir(parents=True)
    (folder / ".cache/huggingface/download/config.json.metadata").write_text("etag")
    assert codes_of(judge(folder)) == []


def test_names_that_lead_out_of_the_folder_are_not_followed(folder, tmp_path):
    entries = {"../secret": {"nbytes": 1, "sha256": "ab"}, "/etc/hostname": {"nbytes": 1, "sha256": "ab"}}
    (folder / "shardwright.json").write_text(json.dumps({"files": entries}))
    assert codes_of(judge(folder, in_stage=True)) == ["manifest.missing"] * 2 + ["manifest.unlisted"] * 2


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"files": [1]}', '{"files": {"config.json": 3}}', "{}"])
def test_a_manifest_of_another_form_is_one_finding(text, folder):
    (folder / "shardwright.json").write_text(text)
    assert codes_of(judge(folder)) == ["manifest.invalid"]


def test_a_folder_of_another_tool_is_skipped_with_the_reason(folder):
    (folder / "shardwright.json").unlink()
    (folder / "shardwright.committed").unlink()
    result = run(CHECK, Evidence(open_release(folder)), lambda: 0.0)
    assert (result.status, result.reason) == ("skipped", "not made by `shardwright export`")
