"""A save of the real DeepSpeed with AutoTP on two tensor-parallel ranks and as many data-parallel ones as are left, and what it holds.

    python deepspeed_autotp.py STAGE WORLD FOLDER

Writes FOLDER/ckpt and FOLDER/expected.safetensors: masters and moments as the live engine gives them on every rank, joined by hand. Made
tests/golden/deepspeed/zero*_autotp2, with the Python of an environment that has DeepSpeed; imports nothing of the product.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file

TP_DEGREE, STEPS = 2, 2
SPECS = [
    {"patterns": [r".*\.(o_proj|down_proj)\.(weight|bias)$"], "partition_type": "row"},
    {"patterns": [r".*\.up_proj\.(weight|bias)$"], "partition_type": "column"},
    {"patterns": [r".*\.qkv_proj\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
]


class Block(torch.nn.Module):
    """Column-parallel, row-parallel, fused and replicated weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.qkv_proj, self.o_proj = torch.nn.Linear(8, 24, bias=False), torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any function of all weights."""
        mixed = self.o_proj(self.qkv_proj(x)[..., : self.o_proj.weight.shape[1]])
        return self.norm(x + mixed + self.down_proj(torch.relu(self.up_proj(x))))


def _rank(rank: int, stage: int, world: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getppid() % 20000)}
    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.comm.torch as backend
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    backend.build_shm_op = lambda: None  # a kernel that takes minutes to compile
    deepspeed.init_distributed("gloo")
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Embedding(13, 8), Block(), Block(), torch.nn.Linear(8, 13, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": TP_DEGREE, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config=config)
    for step in range(STEPS):
        torch.manual_seed(100 * step)
        engine.backward(engine(torch.randint(0, 13, (2, 5))).float().square().mean())
        engine.step()
    engine.save_checkpoint(f"{folder}/ckpt")
    held = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in engine.module.named_parameters()}
    for slot in ("exp_avg", "exp_avg_sq"):
        held |= {f"{slot}/{name}": safe_get_full_optimizer_state(p, slot).clone() for name, p in engine.module.named_parameters()}
    torch.save(held, f"{folder}/rank{rank}.pt")


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.cat(parts, 1)
    if "up_proj" in name:
        return torch.cat(parts)
    if "qkv_proj" in name:
        return torch.cat([torch.cat(third) for third in zip(*(part.chunk(3) for part in parts), strict=True)])
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def main() -> None:
    """Command line."""
    stage, world, folder = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, (int(stage), int(world), folder), nprocs=int(world))
    ranks = [torch.load(f"{folder}/rank{rank}.pt") for rank in range(TP_DEGREE)]  # consecutive ranks share the parts of one model
    expected = {name: _joined(name, [held[name] for held in ranks]).contiguous() for name in ranks[0]}
    save_file(expected, f"{folder}/expected.safetensors")
    for path in Path(folder).glob("rank*.pt"):
        path.unlink()


if __name__ == "__main__":
    main()
