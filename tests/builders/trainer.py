"""A real, tiny training run to drill: FSDP2 over gloo (or one process alone), dropout, two parameter groups, a warm-up, its own data order.

Everything a resume must bring back shows: dropout draws from the RNG, the rate changes every step, each batch is another one. `build` is
what `shardwright drill --resume tests.builders.trainer:build` calls. Nothing here uses the product.
"""

import hashlib
import json
import os
import pickle
import random
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ROWS, LENGTH, BATCH, VOCAB = 64, 6, 2, 19
TOKENS = BATCH * LENGTH
PEAK = 0.01


class Net(nn.Module):
    """Embedding, a hidden layer with dropout and a norm, a head; dims that do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.up = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.norm(nn.functional.dropout(torch.relu(self.up(self.embed(ids))), 0.2)))


class Run:
    """One rank of the run."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(5)
        self.rank, self.world, self.taken, self.count = rank, world, 0, 0
        self.model = Net()
        if world > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        decay = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=PEAK)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 20))
        generator = torch.Generator().manual_seed(11)
        self.data = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
        self.order = torch.randperm(ROWS, generator=generator).tolist()[rank::world]
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)

    def state(self) -> dict[str, object]:
        """Return what is saved."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.model, self.optimizer)
        rng = pickle.dumps({"torch": torch.get_rng_state(), "python": random.getstate()})
        return {
            "model": model,
            "optim": optim,
            "lr_scheduler": self.schedule.state_dict(),
            "dataloader": {f"dp_rank_{self.rank}": pickle.dumps({"samples_yielded": self.taken})},
            "rng": {f"rank_{self.rank}": rng},
            "train_state": {"step": self.count, "ntokens_seen": self.count * TOKENS * self.world},
        }

    def restore(self, state: dict) -> None:
        """Put a loaded state into place, the RNG last."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.schedule.load_state_dict(state["lr_scheduler"])
        self.taken = pickle.loads(state["dataloader"][f"dp_rank_{self.rank}"])["samples_yielded"]
        self.count = state["train_state"]["step"]
        self.restore_rng(state)

    def restore_rng(self, state: dict) -> None:
        """Put the RNG into place."""
        rng = pickle.loads(state["rng"][f"rank_{self.rank}"])
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])

    def next_batch(self) -> torch.Tensor:
        """Return the next rows of this rank."""
        rows = [self.order[(self.taken + n) % len(self.order)] for n in range(BATCH)]
        self.taken += BATCH
        return self.data[rows]

    def step(self, batch: torch.Tensor) -> float:
        """Train on one batch."""
        logits = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.count += 1
        return float(loss.detach())

    def rates(self) -> list[float]:
        """Return the learning rates in use."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def build(rank: int, world: int) -> Run:
    """What --resume calls."""
    return Run(rank, world)


def write_run(root: Path, *, world: int = 1, saves: tuple[int, ...] = (3, 6), last: int = 10) -> Path:
    """Train to step `last`, save at `saves` into root/step-N, log every step; returns the log."""
    root.mkdir(parents=True, exist_ok=True)
    if world == 1:
        _train(0, 1, str(root), saves, last)
    else:
        mp.spawn(_rank, (world, str(root), saves, last), nprocs=world)
    log = root.parent / f"{root.name}.log.jsonl"
    log.write_text("".join((root / f"log.{rank}").read_text() for rank in range(world)))
    for rank in range(world):
        (root / f"log.{rank}").unlink()
    return log


def digest_batch(batch: torch.Tensor) -> str:
    """What a trainer logs of a batch."""
    return hashlib.sha256(batch.contiguous().numpy().tobytes()).hexdigest()


def _rank(rank: int, world: int, root: str, saves: tuple[int, ...], last: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{root}.rendezvous", rank=rank, world_size=world)
    _train(rank, world, root, saves, last)
    dist.destroy_process_group()


def _train(rank: int, world: int, root: str, saves: tuple[int, ...], last: int) -> None:
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    run = Run(rank, world)
    with (Path(root) / f"log.{rank}").open("w") as log:
        for step in range(1, last + 1):
            batch = run.next_batch()
            rng = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
            rates, loss = run.rates(), run.step(batch)
            row = {"step": step, "rank": rank, "loss": loss, "lr": rates, "batch": digest_batch(batch), "rng": rng}
            log.write(json.dumps({**row, "tokens": TOKENS, "time": time.time()}) + "\n")
            if step in saves:
                dcp.save(run.state(), checkpoint_id=Path(root) / f"step-{step}", no_dist=world == 1)
