"""A drill killed at any moment changes nothing of the run, and the next one works."""

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tasks.drill_history import HISTORY_NAME, append_history, read_history
from tests.builders.forking import Forker
from tests.builders.trainer import write_run
from validators.drills.evidence import PastDrill


@pytest.fixture(scope="module")
def forker():
    with Forker() as running:
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "run"
    write_run(folder)
    return folder


def _contents(root: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(root.rglob("*")) if p.is_file()}


def test_fifty_kills_at_random_moments_change_nothing_and_the_next_drill_works(forker, root, tmp_path):
    before, rng = _contents(root), random.Random(9)
    request = {"root": str(root), "runs": str(tmp_path / "runs")}
    whole = forker.drill(request, tmp_path / "log")
    assert (whole.signal, whole.message) == (0, "")
    killed, seconds = 0, whole.seconds
    for _ in range(50):
        ending = forker.drill(request, tmp_path / "log", kill_after=rng.uniform(0, seconds))
        assert not ending.refusal, ending.message
        killed += ending.signal == signal.SIGKILL
        if not ending.signal:
            seconds = min(seconds, ending.seconds)  # the first run may have been a slow one
        assert _contents(root) == before
    assert killed > 25
    again = forker.drill(request, tmp_path / "log")
    assert (again.signal, again.message) == (0, "")
    assert len(read_history(tmp_path / "runs", root)) >= 2
    assert _contents(root) == before


@pytest.mark.slow
def test_processes_of_a_killed_restore_end_with_it(forker, root, tmp_path):
    request = {"root": str(root), "runs": str(tmp_path / "runs"), "level": "D3", "max_ranks": 2}
    for seconds in (2.0, 5.0, 8.0):
        forker.drill(request, tmp_path / "log", kill_after=seconds)
    deadline = time.monotonic() + 10
    while _workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _workers(tmp_path) == []


def _workers(folder: Path) -> list[int]:
    lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if "tasks.restoring.worker" in line and any(str(folder) in word for word in line)]


def test_a_torn_line_of_the_history_is_dropped_by_the_next_drill(tmp_path):
    past = PastDrill("drill-1", "2026-11-29T23:00:00+00:00", "D2", 6, True, "restorable", 1.0, 2.0, 3)
    append_history(tmp_path, tmp_path, past)
    with (tmp_path / HISTORY_NAME).open("a") as file:
        file.write('{"root": "/run", "run_id": "dri')
    kept = replace(past, root=str(tmp_path))
    assert read_history(tmp_path, tmp_path) == (kept,)
    append_history(tmp_path, tmp_path, past)
    assert read_history(tmp_path, tmp_path) == (kept, kept)


def test_a_restore_whose_drill_has_ended_before_it_began_ends_at_once(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    command = [sys.executable, "-m", "tasks.restoring.worker", "restore", str(tmp_path / "none"), str(tmp_path / "answer"), str(child.pid)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
