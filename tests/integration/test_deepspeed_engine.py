"""The real DeepSpeed goes on from a universal checkpoint of ours, at another world size, with exactly the state it had.

Runs where SHARDWRIGHT_DEEPSPEED names the Python of an environment that has DeepSpeed and torch; minutes, the first time.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from flows.reshard_command import write_checkpoint

PYTHON = os.environ.get("SHARDWRIGHT_DEEPSPEED", "")
ENGINE = Path(__file__).with_name("deepspeed_engine.py")


def _run(mode: str, stage: int, world: int, folder: Path, dump: Path) -> dict[str, torch.Tensor]:
    subprocess.run([PYTHON, ENGINE, mode, str(stage), str(world), folder, dump], check=True, capture_output=True, timeout=900)
    return torch.load(dump, weights_only=True)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="SHARDWRIGHT_DEEPSPEED: not set")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_has_the_same_state_at_another_world_size(stage, tmp_path):
    trained = _run("train", stage, 2, tmp_path / "ckpt", tmp_path / "trained.pt")
    universal = write_checkpoint(tmp_path / "ckpt", tmp_path / "universal")
    for world in (1, 3):
        loaded = _run("load", stage, world, universal, tmp_path / f"loaded{world}.pt")
        assert loaded.keys() == trained.keys()
        assert [name for name, value in trained.items() if not torch.equal(value, loaded[name])] == []
