"""Runs of many saves, each a real DCP save of a tiny model that torch wrote once and that is linked into a folder per step."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

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
            os.link(first / file, folder / file)
    return root


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
    row |= {"rto_seconds": 1.0, "rpo_seconds": 1.0, "nbytes": 1, "drilled": list(names)}
    with (runs / "drills.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def report_on(runs: Path, run_id: str, source: str, kind: str = "export", subject: str = "/out") -> Path:
    """Leave a report's stored form, as far as retention looks at it."""
    folder = runs / run_id
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"kind": kind, "source": source, "subject": subject}))
    return folder


def names_in(root: Path) -> set[str]:
    """The step folders that are there."""
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}
