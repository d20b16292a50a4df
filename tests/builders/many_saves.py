"""Runs of many saves, each a real DCP save of a tiny model that torch wrote once and that is copied into a folder per step."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.builders.dcp import save_alone

DRILLED_LATER = "2099-01-01T00:00:00+00:00"


def make_saves(root: Path, steps: Iterable[int], name: str = "step-{}") -> Path:
    """Write a save per step; returns the root."""
    first = root.parent / f"{root.name}.first"
    weight = torch.arange(6.0).reshape(2, 3)
    save_alone({"model": {"w": weight}, "optim": {"state": {"w": {"exp_avg": weight, "step": torch.tensor(3.0)}}}}, first)
    files = [entry.name for entry in os.scandir(first)]
    for step in steps:
        folder = root / name.format(step)
        folder.mkdir(parents=True)
        for file in files:
            shutil.copyfile(first / file, folder / file)
        written_at(folder, step)
    return root


def trainers_save(folder: Path, ranks: int = 0) -> Path:
    """What Trainer leaves, as far as its files' names go, with the random numbers of so many ranks; returns the folder."""
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    torch.save({}, folder / "optimizer.pt")
    torch.save({}, folder / "scheduler.pt")
    for rank in range(ranks):
        (folder / f"rng_state_{rank}.pth").write_bytes(b"numbers")
    (folder / "trainer_state.json").write_text("{}")
    return written_at(folder, int(folder.name.rpartition("-")[2]))


def written_at(folder: Path, seconds: int) -> Path:
    """Set the times of all a save holds to this many seconds after 2001; returns the folder."""
    for path in folder.rglob("*"):
        os.utime(path, (1e9 + seconds, 1e9 + seconds), follow_symlinks=False)
    return folder


def verify(root: Path, runs: Path, names: Iterable[str], *, green: bool = True, finished: str = DRILLED_LATER) -> None:
    """Add the line that a drill of these saves leaves in the history, as it stands in the file."""
    runs.mkdir(parents=True, exist_ok=True)
    row = {
        "root": str(root.resolve()),
        "run_id": "drill-1",
        "finished": finished,
        "level": "D2",
        "step": 1,
        "green": green,
        "verdict": "restorable",
    }
    drilled = list(names)
    row |= {"rto_seconds": 1.0, "rpo_seconds": 1.0, "nbytes": 1, "drilled": drilled, "listings": {n: listing_of(root / n) for n in drilled}}
    with (runs / "drills.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def listing_of(save: Path) -> str:
    """What a drill notes of a save's files: sha256 over a line per file, `name NUL size NUL mtime in ns`, sorted by name."""
    rows = []
    for path in save.rglob("*"):
        if not path.is_dir() and path.name not in ("shardwright.record.json", "shardwright.thinned.json"):
            stat = path.lstat()
            rows.append(f"{path.relative_to(save)}\0{stat.st_size}\0{stat.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(rows)).encode()).hexdigest()


def report_on(runs: Path, run_id: str, source: str, kind: str = "export", subject: str = "/out", **more: str) -> Path:
    """Leave a report's stored form, as far as retention looks at it."""
    folder = runs / run_id
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"kind": kind, "source": source, "subject": subject, **more}))
    return folder


def names_in(root: Path) -> set[str]:
    """The step folders that are there."""
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}
