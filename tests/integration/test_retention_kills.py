"""`retain --apply` killed at any moment: what is kept is whole, what goes is whole, gone or marked as going, and a rerun finishes."""

import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.builders.forking import Forker
from tests.builders.many_saves import make_saves, trainers_save, verify

STEPS = range(10, 401, 10)
KEPT = {f"step-{step}" for step in (380, 390, 400)}


@pytest.fixture(scope="module")
def forker():
    with Forker() as running:
        yield running


def _prepare(folder: Path) -> dict[str, object]:
    shutil.rmtree(folder, ignore_errors=True)
    root = make_saves(folder / "run", STEPS)
    verify(root, folder / "runs", ["step-390", "step-400"])
    return _request(folder, "keep_last: 3\n")


def _request(folder: Path, policy: str) -> dict[str, object]:
    (folder / "retain.yaml").write_text(policy)
    return {"root": str(folder / "run"), "runs": str(folder / "runs"), "policy": str(folder / "retain.yaml"), "apply": True}


def _is_whole(save: Path, model: dict[str, int]) -> bool:
    return {path.name: path.stat().st_size for path in save.iterdir()} == model


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments_lose_nothing_and_a_rerun_finishes(forker, tmp_path):
    whole = forker.retain(_prepare(tmp_path / "first"), tmp_path / "log")
    assert (whole.signal, whole.message) == (0, "")
    assert {path.name for path in (tmp_path / "first" / "run").iterdir()} == KEPT
    rng, killed, halfway, seconds = random.Random(4), 0, 0, whole.seconds
    for attempt in range(100):
        request = _prepare(tmp_path / "again")
        root = Path(str(request["root"]))
        model = {path.name: path.stat().st_size for path in (root / "step-400").iterdir()}
        moment = {"kill_after": rng.uniform(0, 1.1 * seconds)}
        if attempt % 2:  # among the deletions, however short a part of the run they are here
            moment = {"kill_when_left": [str(root), "*", rng.randrange(len(KEPT) + 1, len(STEPS))]}
        ending = forker.retain(request, tmp_path / "log", **moment)
        assert not ending.refusal, ending.message
        killed += ending.signal == signal.SIGKILL
        if not ending.signal:
            seconds = min(seconds, ending.seconds)  # the first run may have been a slow one
        left = {path.name for path in root.iterdir()}
        halfway += left > KEPT and len(left) < len(STEPS)
        assert left >= KEPT
        assert all(_is_whole(root / name, model) for name in left if not name.startswith("."))
        assert all(re.fullmatch(r"\.step-\d+\.shardwright-going", name) for name in left if name.startswith("."))
        again = forker.retain(request, tmp_path / "log")
        assert (again.signal, again.message) == (0, "")
        assert {path.name for path in root.iterdir()} == KEPT
    assert killed > 50
    assert halfway > 25


RANKS = 200
STATE = {"optimizer.pt", "scheduler.pt", *(f"rng_state_{rank}.pth" for rank in range(RANKS))}
WEIGHTS = {"model.safetensors", "trainer_state.json"}
MARK = "shardwright.thinned.json"


@pytest.mark.slow
def test_kills_among_thinnings_leave_each_save_whole_or_marked_and_a_rerun_finishes(forker, tmp_path):
    rng, marked = random.Random(7), 0
    for _ in range(15):
        folder = tmp_path / "run-of-trainer"
        shutil.rmtree(folder, ignore_errors=True)
        saves = [trainers_save(folder / "run" / f"checkpoint-{step}", RANKS) for step in range(1, 7)]
        verify(folder / "run", folder / "runs", [save.name for save in saves[-2:]])
        request = _request(folder, "keep_last: 2\nweights_only_every_steps: 1\n")
        left = rng.randrange(2, len(saves)) * RANKS + rng.randrange(RANKS // 2, RANKS)  # soon after a save's first file is gone
        moment = [str(folder / "run"), "*/rng_state_*", left]
        ending = forker.retain(request, tmp_path / "log", kill_when_left=moment)
        assert not ending.refusal, ending.message
        for save in saves:
            held = {path.name for path in save.iterdir()} - {path.name for path in save.glob(f".{MARK}*")}
            assert held >= WEIGHTS
            assert held == WEIGHTS | STATE or MARK in held
        marked += any((save / MARK).exists() and STATE & {path.name for path in save.iterdir()} for save in saves)
        assert forker.retain(request, tmp_path / "log").message == ""
        assert all({path.name for path in save.iterdir()} >= WEIGHTS | STATE for save in saves[-2:])
        assert all({path.name for path in save.iterdir()} == WEIGHTS | {MARK} for save in saves[:-2])
    assert marked > 0
