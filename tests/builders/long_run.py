"""A synthetic run of six hundred steps: three loss spikes, a switch of data, a gap in the log, saves with counters, evaluations."""

import json
import os
import random
from pathlib import Path

import torch

from tests.builders.dcp import save_alone
from tests.builders.many_saves import verify

LAST, EVERY, TOKENS = 600, 25, 1000
SPIKES = {130: 4.0, 131: 3.0, 290: 5.0, 470: 2.5}  # step → added to the loss
SWITCH, GAP = 351, range(521, 540)


def make_long_run(base: Path) -> Path:
    """Write base/run, base/log.jsonl, base/evals and base/runs; returns the root."""
    root = base / "run"
    for step in range(EVERY, LAST + 1, EVERY):
        write_save(root / f"step-{step}", step)
    write_log(base / "log.jsonl")
    evals = base / "evals"
    evals.mkdir()
    for step in (200, 400):
        told = {"step": step, "tokens": step * TOKENS, "data": data_of(step), "results": {"arc/acc": step / 1000}}
        (evals / f"{step}.json").write_text(json.dumps(told))
    names = {"model_args": {"pretrained": f"{root}/step-600"}}
    (evals / "results_2026-01-01.json").write_text(json.dumps({"results": {"arc": {"alias": "arc", "acc,none": 0.6}}, "config": names}))
    verify(root, base / "runs", ["step-575", "step-600"])
    return root


def write_save(folder: Path, step: int, tokens: int | None = None, *, ranks: int = 1) -> None:
    """Write one save with its counters; of several ranks, its files are named as theirs."""
    counted = {"step": step, "ntokens_seen": step * TOKENS if tokens is None else tokens}
    tensors = {f"w{rank}": torch.ones(2, 3) for rank in range(ranks)}
    save_alone({"model": tensors, "train_state": counted}, folder, files=ranks)
    for rank in range(1, ranks):
        metadata = folder / ".metadata"
        (folder / f"__0_{rank}.distcp").rename(folder / f"__{rank}_0.distcp")
        metadata.write_bytes(metadata.read_bytes().replace(f"__0_{rank}.".encode(), f"__{rank}_0.".encode()))
    os.utime(folder / ".metadata", (1e9 + step, 1e9 + step))


def data_of(step: int) -> str:
    """The version of the data at a step."""
    return "web-1" if step < SWITCH else "web-2"


def write_log(path: Path, *, skip: range = GAP) -> None:
    """Write the log: noise of a hundredth around a falling loss, two ranks."""
    noise = random.Random(3)
    with path.open("w") as log:
        for step in range(1, LAST + 1):
            for rank in range(2):
                loss = 3.0 - step / 1000 + noise.gauss(0, 0.01) + SPIKES.get(step, 0.0)
                row = {"step": step, "rank": rank, "loss": loss, "consumed_tokens": step * TOKENS, "data": data_of(step)}
                if step not in skip:
                    log.write(json.dumps(row) + "\n")
