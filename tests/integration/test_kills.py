"""An export killed at any moment leaves the destination absent or whole, and the same command then finishes it, bit for bit the same."""

import random
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.builders.forking import Forker
from tests.builders.wholeness import content_of, is_whole, tensors_of
from tests.integration.line import beside, request_for

LAST = ("checked", "synced", "marked", "renamed")


@pytest.fixture(scope="module")
def forker():
    with Forker() as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(forker, written, tmp_path_factory):
    """A release nobody disturbed, and the steps of its run."""
    base = tmp_path_factory.mktemp("undisturbed")
    ending = forker.export(request_for(written / "fsdp2/ckpt", base), base / "log")
    assert (ending.signal, ending.message) == (0, "")
    return base / "out", ending


def _rerun(forker: Forker, written: Path, base: Path, reference: Path) -> tuple[str, ...]:
    ending = forker.export(request_for(written / "fsdp2/ckpt", base), base / "log")
    assert (ending.signal, ending.message) == (0, "")
    assert is_whole(base / "out")
    assert content_of(base / "out") == content_of(reference)
    assert beside(base) == {"out"}
    return ending.steps


def test_the_undisturbed_release_is_whole_and_holds_the_live_values(undisturbed, written):
    release, ending = undisturbed
    assert is_whole(release)
    assert ending.steps[0] == "staged"
    assert ending.steps[-4:] == LAST
    assert len(ending.steps) >= 8  # several files
    truth, found = load_file(written / "fsdp2/truth.safetensors"), tensors_of(release)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.slow
def test_a_kill_at_every_step_leaves_old_or_new_and_the_rerun_goes_on(forker, written, undisturbed, tmp_path):
    release, whole_run = undisturbed
    for step in whole_run.steps:
        base = tmp_path / step.replace(" ", "-")
        killed = forker.export(request_for(written / "fsdp2/ckpt", base), base / "log", kill_at=step)
        assert (killed.signal, killed.steps[-1]) == (signal.SIGKILL, step)
        if step == "renamed":
            assert is_whole(base / "out")
            assert content_of(base / "out") == content_of(release)
            again = forker.export(request_for(written / "fsdp2/ckpt", base), base / "log")
            assert again.refusal == "CommitError"
            assert "committed release" in again.message
        else:
            assert not (base / "out").exists()
            steps = _rerun(forker, written, base, release)
            if step.startswith("wrote"):
                assert step not in steps  # finished before the kill, so not written again


@pytest.mark.slow
def test_a_hundred_kills_at_random_times_never_leave_a_mixture(forker, written, undisturbed, tmp_path):
    release, whole_run = undisturbed
    base, rng, killed, published, whole = tmp_path / "a", random.Random(5), 0, 0, whole_run.seconds
    for attempt in range(100):
        request = request_for(written / "fsdp2/ckpt", base)
        ending = forker.export(request, base / "log", kill_after=rng.uniform(0, 1.1 * whole))
        assert not ending.refusal.startswith("CRASH"), ending.message
        killed += ending.signal == signal.SIGKILL
        if not ending.signal:
            whole = min(whole, ending.seconds)  # the first run may have been a slow one
        if (base / "out").exists():
            assert is_whole(base / "out")
            assert content_of(base / "out") == content_of(release)
            published += 1
            base = tmp_path / f"after-{attempt}"
    assert killed > 50
    if not (base / "out").exists():
        _rerun(forker, written, base, release)
    assert published < 100


def test_finished_files_are_kept_and_a_tampered_one_is_written_again(forker, written, undisturbed, tmp_path):
    release, whole_run = undisturbed
    last_file = max(step for step in whole_run.steps if step.startswith("wrote"))  # one worker writes them in the order of their names
    request = request_for(written / "fsdp2/ckpt", tmp_path, workers=1)
    forker.export(request, tmp_path / "log", kill_at=last_file)
    (stage,) = tmp_path.glob(".out.shardwright-*/")
    files = sorted(stage.glob("*.safetensors"))
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
    tampered = bytearray(files[0].read_bytes())
    tampered[-1] ^= 1
    files[0].write_bytes(tampered)
    before[files[0].name] = (0, 0)
    steps = _rerun(forker, written, tmp_path, release)
    assert [step for step in steps if step.startswith("wrote")] == [f"wrote {files[0].name}"]
    after = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (tmp_path / "out").glob("*.safetensors")}
    assert {name for name in after if after[name] != before[name]} == {files[0].name}


def test_a_torn_progress_record_means_the_file_is_written_again(forker, written, undisturbed, tmp_path):
    release, whole_run = undisturbed
    first = next(step for step in whole_run.steps if step.startswith("wrote"))
    forker.export(request_for(written / "fsdp2/ckpt", tmp_path), tmp_path / "log", kill_at="checked")
    forker.export(request_for(written / "fsdp2/ckpt", tmp_path), tmp_path / "log", kill_at=first)
    records = sorted(tmp_path.glob(".out.shardwright-*/.progress/*.json"))
    assert records
    for record, torn in zip(records, ('{"name": "mod', "", "[]", '{"name": 1}'), strict=False):
        record.write_text(torn)  # what a power failure may leave
    steps = _rerun(forker, written, tmp_path, release)
    assert first in steps


def test_what_another_run_left_in_the_stage_is_not_published(forker, written, undisturbed, tmp_path):
    release, _ = undisturbed
    forker.export(request_for(written / "fsdp2/ckpt", tmp_path), tmp_path / "log", kill_at="marked")
    (stage,) = tmp_path.glob(".out.shardwright-*/")
    (stage / "merges.txt").write_text("of the tokenizer that was handed in before")
    (stage / "model-00009-of-00009.safetensors").write_bytes(b"of nobody")
    _rerun(forker, written, tmp_path, release)
