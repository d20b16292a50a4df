"""The real DeepSpeed engine, in processes of its own: train and save, or load a universal checkpoint; either way the state is dumped.

    python deepspeed_engine.py train|load STAGE WORLD FOLDER DUMP

Run by tests/integration/test_deepspeed_engine.py with the Python of an environment that has DeepSpeed; imports nothing of the product.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

STEPS = 3


def _model() -> torch.nn.Module:
    torch.manual_seed(11)
    return torch.nn.Sequential(torch.nn.Embedding(13, 6), torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 13, bias=False))


def _rank(rank: int, mode: str, stage: int, world: int, folder: str, dump: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getppid() % 20000)}
    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.comm.torch as backend
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    backend.build_shm_op = lambda: None  # a kernel that takes minutes to compile
    deepspeed.init_distributed("gloo")
    model = _model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": mode == "load"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config=config)
    if mode == "train":
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)
            logits = engine(torch.randint(0, 13, (2, 5)))
            engine.backward(logits.float().square().mean())
            engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    held = {}
    for name, parameter in engine.module.named_parameters():
        held[f"fp32/{name}"] = safe_get_full_fp32_param(parameter)
        for slot in ("exp_avg", "exp_avg_sq"):
            held[f"{slot}/{name}"] = safe_get_full_optimizer_state(parameter, slot)
    steps = [state["step"] for state in engine.optimizer.optimizer.state.values() if "step" in state]
    if rank == 0:
        torch.save({**{name: value.detach().clone() for name, value in held.items()}, "step": torch.tensor(float(steps[0]))}, dump)


def main() -> None:
    """Command line."""
    mode, stage, world, folder, dump = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, (mode, int(stage), int(world), folder, dump), nprocs=int(world))


if __name__ == "__main__":
    main()
