"""The training behind the recorded `fsdp2_*` checkpoints, as `--resume` takes it. Its steps are a file beside the recorded cases.

`SHARDWRIGHT_CASES` names the folder of cases; the file is `../tools/fsdp2_steps.py` from there.
"""

import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def steps_module():
    """Return the recorded run's own module."""
    folder = str(Path(os.environ["SHARDWRIGHT_CASES"]).parent / "tools")
    if folder not in sys.path:
        sys.path.append(folder)
    import fsdp2_steps

    return fsdp2_steps


class CaseRun:
    """One rank of a recorded run."""

    def __init__(self, rank: int, world: int, kind: str, dtype: torch.dtype, flatten: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.steps, self.rank, self.flatten = steps_module(), rank, flatten
        self.model = self.steps.build(kind, dtype)
        mesh = init_device_mesh("cpu", (world,))
        inner = self.model.transformer.h if kind == "gpt2" else self.model.model.layers
        for layer in inner:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer, self.schedule = self.steps.optimizer_and_schedule(self.model)
        self.loader = self.steps.loader(rank, dist.get_world_size())
        self.train_state: dict[str, object] = {"step": 0, "ntokens_seen": 0}
        self.batches = None

    def state(self) -> dict[str, object]:
        """Return what was saved."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        model, optim = get_state_dict(self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=self.flatten))
        rng = pickle.dumps({"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()})
        return {
            "model": model,
            "optim": optim,
            "lr_scheduler": self.schedule.state_dict(),
            "dataloader": {f"dp_rank_{self.rank}": pickle.dumps(self.loader.state_dict())},
            "rng": {f"rank_{self.rank}": rng},
            "train_state": dict(self.train_state),
        }

    def restore(self, state: dict) -> None:
        """Put a loaded state into place; the iterator draws from the RNG, which comes last."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=self.flatten)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
        self.schedule.load_state_dict(state["lr_scheduler"])
        self.loader.load_state_dict(pickle.loads(state["dataloader"][f"dp_rank_{self.rank}"]))
        self.train_state = state["train_state"]
        self.batches = iter(self.loader)
        rng = pickle.loads(state["rng"][f"rank_{self.rank}"])
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])

    def next_batch(self) -> torch.Tensor:
        """Return the next batch of this rank."""
        return next(self.batches)

    def step(self, batch: torch.Tensor) -> float:
        """Train on it."""
        return self.steps.step(self.model, self.optimizer, self.schedule, batch)

    def rates(self) -> list[float]:
        """Return the rates in use."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def llama(rank: int, world: int) -> CaseRun:
    """fsdp2_w2_llama_untied."""
    return CaseRun(rank, world, "llama", torch.float32, flatten=False)


def llama_tied_bf16(rank: int, world: int) -> CaseRun:
    """fsdp2_w4_uneven_llama_tied_bf16."""
    return CaseRun(rank, world, "llama_tied", torch.bfloat16, flatten=False)


def gpt2(rank: int, world: int) -> CaseRun:
    """fsdp2_w2_gpt2_tied."""
    return CaseRun(rank, world, "gpt2", torch.float32, flatten=False)


def mixtral(rank: int, world: int) -> CaseRun:
    """fsdp2_w2_mixtral_flatopt."""
    return CaseRun(rank, world, "mixtral", torch.float32, flatten=True)
