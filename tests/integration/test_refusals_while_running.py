"""What the machine does to an export: full disk, unreadable files, a second export, a source that changes."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from flows.export import run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from reports.errors import CommitError, RequestError
from tests.builders.forking import Forker
from tests.builders.hf import WEIGHTS, write_shards
from tests.builders.wholeness import content_of, is_whole, tree_of
from tests.integration.line import beside, request_for

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its user or mount")


@pytest.fixture(scope="module")
def forker():
    with Forker() as running:
        yield running


@pytest.fixture
def source(tmp_path):
    """A Hugging Face folder of two shards: no checksums of the writer's."""
    write_shards(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def test_a_read_only_source_is_left_exactly_as_it_was(forker, source, base):
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree_of(source)
    ending = forker.export(request_for(source, base), base / "log")
    assert (ending.signal, ending.message) == (0, "")
    assert is_whole(base / "out")
    assert tree_of(source) == before


def test_a_destination_that_exists_is_not_touched(forker, source, base):
    (base / "out").mkdir()
    (base / "out" / "notes.txt").write_text("mine")
    before = tree_of(base / "out")
    ending = forker.export(request_for(source, base), base / "log")
    assert ending.refusal == "CommitError"
    assert str(base / "out") in ending.message
    assert "another --to" in ending.message
    assert tree_of(base / "out") == before
    assert beside(base) == {"out"}


@pytest.mark.parametrize("kind", ["dangling link", "file"])
def test_anything_at_the_destination_is_refused(forker, source, base, kind):
    if kind == "file":
        (base / "out").write_text("mine")
    else:
        (base / "out").symlink_to(base / "nowhere")
    assert forker.export(request_for(source, base), base / "log").refusal == "CommitError"
    assert beside(base) == {"out"}


def test_a_destination_that_appears_during_the_run_wins(forker, source, base):
    (base / "theirs").write_text("theirs")
    ending = forker.export(request_for(source, base), base / "log", copy_at=["marked", str(base / "theirs"), str(base / "out")])
    assert ending.refusal == "CommitError"
    assert (base / "out").read_text() == "theirs"
    assert beside(base) == {"out", "theirs"}


def test_of_two_exports_to_one_destination_the_second_is_refused_and_the_first_goes_on(source, base):
    from flows.export import export_line
    from flows.run import Run

    refusals = []

    def second(step: str) -> None:
        if step == "checked":
            with pytest.raises(CommitError, match="another export to this destination is running") as refusal:
                run_export(ExportRequest.model_validate(request_for(source, base)), PlainRunner(), Silent())
            refusals.append(refusal.value)

    request = ExportRequest.model_validate(request_for(source, base))
    run = Run.create("export", request.runs, PlainRunner())
    run.reached = second
    export_line(request, run)
    assert len(refusals) == 1
    assert is_whole(base / "out")
    assert beside(base) == {"out"}


def test_a_write_that_fails_half_way_is_refused_with_a_remedy_and_nothing_stays(forker, base, tmp_path):
    # A limit on file size fails a write in the middle, as a quota does.
    write_shards(tmp_path / "big", {"a": torch.ones(10), "w": torch.ones(300_000)})
    ending = forker.export(request_for(tmp_path / "big", base), base / "log", file_nbytes=500_000)
    assert ending.refusal == "RequestError"
    assert "Free some space" in ending.message
    assert beside(base) == set()


@needs_root
def test_a_full_file_system_is_refused_with_a_remedy_and_nothing_stays(forker, written, base):
    disk = base / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no mount here: {mounted.stderr.strip()}")
    try:
        # the weights fit by the count made before; the file beside them then does not
        filler = disk / "filler"
        filler.write_bytes(bytes(44 << 10))
        request = request_for(written / "fsdp2/ckpt", base, to=str(disk / "out"))
        ending = forker.export(request, base / "log")
        assert ending.refusal == "RequestError", ending.message
        assert "Free some space" in ending.message
        assert [path.name for path in disk.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@needs_root
def test_a_file_one_may_not_read_is_named(forker, source):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        base = Path(folder)
        shutil.copytree(source, base / "source")
        secret = base / "source/model-00002-of-00002.safetensors"
        for path in secret.parent.iterdir():
            path.chmod(0o644)
        secret.chmod(0o000)
        os.chmod(base, 0o777)
        for name in ("runs", "log"):
            (base / name).mkdir()
            os.chmod(base / name, 0o777)
        ending = forker.export(request_for(base / "source", base), base / "log", uid=NOBODY)
        assert ending.refusal == "FormatError", ending.message
        assert secret.name in ending.message
        assert "ermission" in ending.message
        assert beside(base) == {"source"}


@needs_root
def test_a_destination_one_may_not_write_is_named(forker, source):
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        shutil.copytree(source, base / "source")
        os.chmod(base, 0o755)
        for name in ("runs", "log"):
            (base / name).mkdir()
            os.chmod(base / name, 0o777)
        ending = forker.export(request_for(base / "source", base), base / "log", uid=NOBODY)
        assert ending.refusal == "RequestError"
        assert str(base) in ending.message
        assert beside(base) == {"source"}


def test_a_source_that_changes_while_it_is_read_is_refused(forker, source, base, tmp_path):
    other = tmp_path / "other"
    write_shards(other, {name: value + 1 for name, value in WEIGHTS.items()})
    name = "model-00001-of-00002.safetensors"
    ending = forker.export(request_for(source, base), base / "log", copy_at=["staged", str(other / name), str(source / name)])
    assert ending.refusal == "FormatError"
    assert "changed since this run began" in ending.message
    assert beside(base) == set()


@pytest.mark.parametrize("option", ["to", "runs"])
@pytest.mark.parametrize("way", ["plain", "dots", "link"])
def test_nothing_is_written_into_the_source(source, base, tmp_path, option, way):
    (tmp_path / "link").symlink_to(source)
    inside = {"plain": source / "x", "dots": source / ".." / "source" / "x", "link": tmp_path / "link" / "x"}[way]
    before = tree_of(source)
    with pytest.raises(RequestError, match=f"^--{option} .*lies inside the checkpoint"):
        run_export(ExportRequest.model_validate(request_for(source, base, **{option: str(inside)})), PlainRunner(), Silent())
    assert tree_of(source) == before


def test_files_of_the_source_are_closed_when_a_run_ends(source, base):
    for number in range(3):
        run_export(ExportRequest.model_validate(request_for(source, base / str(number))), PlainRunner(), Silent())
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert [path for path in held if path.startswith(str(source))] == []


def test_two_exports_of_one_source_are_equal_but_for_the_run(source, base):
    for number in ("one", "two"):
        run_export(ExportRequest.model_validate(request_for(source, base / number, workers=4)), PlainRunner(), Silent())
    assert content_of(base / "one/out") == content_of(base / "two/out")
