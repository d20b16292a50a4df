"""What a request alone shows to be wrong is said before anything is opened, and says what to do."""

import os
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.demo import make_demo
from flows.export import check_request
from flows.preview import plan_export
from flows.requests import ExportRequest
from reports.errors import ReleaseError, RequestError

GOLDEN = Path(__file__).parents[1] / "golden/accelerate_llama"


def ask(to, **more):
    """A sound request but for `more`."""
    return ExportRequest(**{"source": GOLDEN / "ckpt", "assets": GOLDEN / "hf", "to": to, **more})


def test_a_sound_request_passes(tmp_path):
    check_request(ask(tmp_path / "späce \N{SNOWMAN} [x]\N{NO-BREAK SPACE}", golden=GOLDEN / "ref/golden.safetensors"))


@pytest.mark.parametrize(
    ("field", "name", "words"),
    [
        ("source", "nothing", "does not exist"),
        ("source", "file", "is a file"),
        ("source", "folder", "is an empty folder"),
        ("also", "nothing", "does not exist"),
        ("assets", "nothing", "does not exist"),
        ("assets", "file", "is a file, not a folder"),
        ("golden", "nothing", "does not exist"),
        ("golden", "folder", "is a folder, not a file"),
        ("to", "file", "exists already"),
        ("to", "file/below", "is a file"),
    ],
)
def test_a_path_of_the_wrong_kind_is_named(field, name, words, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(ReleaseError) as refused:
        check_request(ask(**{"to": tmp_path / "out", field: [path] if field == "also" else path}))
    assert words in str(refused.value)
    assert str(path if name != "file/below" else path.parent) in str(refused.value)
    assert refused.value.remedy


def test_a_plan_says_that_its_assets_do_not_exist(tmp_path):
    with pytest.raises(RequestError, match="does not exist"):
        plan_export(ask(tmp_path / "out", assets=tmp_path / "nothing"), None)


def test_a_check_nobody_knows_cannot_be_skipped(tmp_path):
    with pytest.raises(RequestError, match="no check 'spelling'"):
        check_request(ask(tmp_path / "out", skip=["spelling=it is fine"]))


def test_dropping_everything_leaves_nothing_to_export(tmp_path):
    with pytest.raises(RequestError, match="leaves no tensor to export"):
        plan_export(ask(tmp_path / "out", drop=["*=all of it"]), None)


def test_a_config_without_a_model_type_is_named_as_such(tmp_path):
    assets = shutil.copytree(GOLDEN / "hf", tmp_path / "hf")
    (assets / "config.json").write_text('{"vocab_size": 99}')
    with pytest.raises(RequestError, match="has no model_type"):
        plan_export(ask(tmp_path / "out", assets=assets), None)


@pytest.mark.parametrize("name", ["hf", "release", "step-8", "notes.txt"])
def test_a_demo_empties_no_folder_that_no_demo_made(name, tmp_path):
    path = tmp_path / name
    path.mkdir()
    with pytest.raises(RequestError, match="holds what no demo made"):
        make_demo(tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_a_demo_in_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="is a file"):
        make_demo(tmp_path / "file")


@pytest.mark.parametrize("field", ["source", "to", "assets", "golden", "runs", "also"])
@pytest.mark.parametrize("name", ["not\udcffutf-8", "new\nline"])
def test_a_path_that_no_report_can_show_is_refused(field, name, tmp_path):
    path = tmp_path / name
    with pytest.raises(ValidationError, match="holds what no report can show"):
        ask(**{"to": tmp_path / "out", field: [path] if field == "also" else path})


@pytest.mark.parametrize("field", ["source", "to", "assets", "golden", "runs", "also"])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_field_is_not_the_working_directory(field, text, tmp_path):
    with pytest.raises(ValidationError, match="is empty"):
        ask(**{"to": tmp_path / "out", field: [text] if field == "also" else text})
