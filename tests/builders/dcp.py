"""Checkpoints as torch's own writers make them, over gloo in four processes, with the whole tensors recorded before anything is sharded.

Nothing here uses the product. Layout `L` becomes `root/L/ckpt` and `root/L/truth.safetensors`, the model's tensors under the names the
writer was given without wrapper prefixes.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn

WORLD = 4
Tensors = dict[str, torch.Tensor]


class Toy(nn.Module):
    """Dims that do not divide by the ranks, a dim smaller than the world, a bias, a 0-d and an integer buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16, dtype=dtype)
        self.up = nn.Linear(16, 34, dtype=dtype)
        self.down = nn.Linear(34, 16, bias=False, dtype=dtype)
        self.few = nn.Linear(16, 3, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.tensor(3.5))
        self.register_buffer("steps", torch.arange(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return something that depends on every parameter."""
        hidden = self.embed(ids)
        return self.few(hidden + self.down(torch.relu(self.up(hidden))))


def make_toy(dtype: torch.dtype = torch.float32) -> Toy:
    """Return the toy with seeded weights, the same in every process."""
    torch.manual_seed(7)
    toy = Toy(dtype)
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return toy


def whole(module: nn.Module) -> Tensors:
    """Return copies of a module's tensors before it is sharded."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.arange(8).reshape(2, 4)).sum().backward()
    optimizer.step()  # lr 0: state is made, weights stay
    return optimizer


def _save_dcp(state: dict, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder)


def fsdp2(folder: Path) -> Tensors:
    """FSDP2 on four ranks, bf16, model and optimizer by torch's state-dict API."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    toy = make_toy(torch.bfloat16)
    truth = whole(toy)
    fully_shard(toy, mesh=_mesh((4,), ("dp",)))
    model, optim = get_state_dict(toy, _train(toy))
    _save_dcp({"model": model, "optim": optim, "train_state": {"step": 3}}, folder)
    return truth


def hsdp(folder: Path) -> Tensors:
    """HSDP, two replicas of two shards, with the wrapper prefixes of activation checkpointing and torch.compile left in."""
    from torch.distributed.fsdp import fully_shard

    toy = make_toy()
    truth = whole(toy)
    fully_shard(toy, mesh=_mesh((2, 2), ("replicate", "shard")))
    state = {f"_checkpoint_wrapped_module._orig_mod.{name}": tensor for name, tensor in toy.state_dict().items()}
    _save_dcp({"app": {"model": state, "rng": torch.get_rng_state()}}, folder)
    return truth


def tp_fsdp(folder: Path) -> Tensors:
    """TP 2 under FSDP2 2: strided rows, rectangles, uneven columns."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    toy = make_toy()
    truth = whole(toy)
    mesh = _mesh((2, 2), ("dp", "tp"))
    parallelize_module(toy, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": RowwiseParallel()})
    fully_shard(toy, mesh=mesh["dp"])
    _save_dcp({"model": toy.state_dict()}, folder)
    return truth


def torchtitan(folder: Path) -> Tensors:
    """torchtitan's shape: the model's names at the root beside the training state; one tensor transposed in memory."""
    from torch.distributed.fsdp import fully_shard

    toy = make_toy()
    truth = whole(toy) | {"turned": torch.arange(4000, dtype=torch.float32).reshape(100, 40)}
    fully_shard(toy, mesh=_mesh((4,), ("dp",)))
    turned = truth["turned"].t().contiguous().t()
    state = toy.state_dict() | {"turned": turned, "optimizer": {"state": {"up.weight": {"exp_avg": torch.ones(3)}}}}
    _save_dcp(state | {"train_state": {"step": torch.tensor(7)}, "dataloader": {"world_size": 4}}, folder / "step-7")
    return truth


def accelerate(folder: Path) -> Tensors:
    """accelerate's shape: two DCP folders and the trainer's files beside them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    toy = make_toy()
    truth = whole(toy)
    fully_shard(toy, mesh=_mesh((4,), ("dp",)))
    model, optim = get_state_dict(toy, _train(toy))
    _save_dcp({"model": model}, folder / "pytorch_model_fsdp_0")
    _save_dcp({"optimizer": optim}, folder / "optimizer_0")
    (folder / "scheduler.bin").touch()
    return truth


def fsdp1(folder: Path) -> Tensors:
    """FSDP1 SHARDED_STATE_DICT through DCP."""
    truth, state = _fsdp1_state(make_toy(), "SHARDED_STATE_DICT", None)
    _save_dcp({"model": state}, folder)
    return truth


def fsdp1_sharded_tensors(folder: Path) -> Tensors:
    """FSDP1 SHARDED_STATE_DICT as ShardedTensors, one torch.save file per rank."""
    truth, state = _fsdp1_state(make_toy(), "SHARDED_STATE_DICT", None)
    _save_rank(state, folder)
    return truth


def fsdp1_dtensors(folder: Path) -> Tensors:
    """FSDP1 SHARDED_STATE_DICT as DTensors (a device mesh was given), one torch.save file per rank."""
    truth, state = _fsdp1_state(make_toy(), "SHARDED_STATE_DICT", _mesh((4,), ("fsdp",)))
    _save_rank(state, folder)
    return truth


def hsdp_dtensors(folder: Path) -> Tensors:
    """FSDP2 with replicas as DTensors, one torch.save file per rank (verl's shape: mesh ddp x fsdp)."""
    from torch.distributed.fsdp import fully_shard

    toy = make_toy(torch.bfloat16)
    truth = whole(toy)
    fully_shard(toy, mesh=_mesh((2, 2), ("ddp", "fsdp")))
    _save_rank(toy.state_dict(), folder)
    return truth


def tp_fsdp_dtensors(folder: Path) -> Tensors:
    """TP 2 under FSDP2 2 as DTensors with strided placements, one torch.save file per rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    toy = make_toy()
    truth = whole(toy)
    mesh = _mesh((2, 2), ("dp", "tp"))
    parallelize_module(toy, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": RowwiseParallel()})
    fully_shard(toy, mesh=mesh["dp"])
    _save_rank({"model": toy.state_dict()}, folder)
    return truth


def fsdp1_local(folder: Path) -> Tensors:
    """FSDP1 LOCAL_STATE_DICT: flat parameters, which cannot be read."""
    _, state = _fsdp1_state(make_toy(), "LOCAL_STATE_DICT", None)
    _save_rank(state, folder)
    return {}


def dcp_hf(folder: Path) -> Tensors:
    """HuggingFaceStorageWriter without consolidation, two files per rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.fsdp import fully_shard

    toy = make_toy(torch.bfloat16)
    truth = whole(toy)
    fully_shard(toy, mesh=_mesh((4,), ("dp",)))
    mapping = {name: 1 if name.startswith("embed") else 2 for name in toy.state_dict()}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save(toy.state_dict(), storage_writer=writer)
    return truth


LAYOUTS: tuple[Callable[[Path], Tensors], ...] = (
    fsdp2,
    hsdp,
    tp_fsdp,
    torchtitan,
    accelerate,
    fsdp1,
    fsdp1_sharded_tensors,
    fsdp1_dtensors,
    hsdp_dtensors,
    tp_fsdp_dtensors,
    fsdp1_local,
    dcp_hf,
)


def write_all(root: Path) -> None:
    """Write every layout under `root`, in four processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mp.spawn(_run_rank, (str(root),), nprocs=WORLD)


def save_alone(state: dict, folder: Path, files: int = 1) -> None:
    """Write a DCP save from this process alone, without a process group, in so many files."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=files), no_dist=True)


def _run_rank(rank: int, root: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=WORLD)
    for layout in LAYOUTS:
        folder = Path(root) / layout.__name__
        (folder / "ckpt").mkdir(parents=True, exist_ok=True)
        truth = layout(folder / "ckpt")
        if rank == 0:
            save_file({name: tensor.contiguous() for name, tensor in truth.items()}, folder / "truth.safetensors")
        dist.barrier()
    dist.destroy_process_group()


def _fsdp1_state(toy: Toy, kind: str, mesh: object) -> tuple[Tensors, dict]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    truth = whole(toy)
    model = FSDP(toy, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=kind == "SHARDED_STATE_DICT")
    with FSDP.state_dict_type(model, StateDictType[kind]):
        return truth, model.state_dict()


def _save_rank(state: dict, folder: Path) -> None:
    torch.save(state, folder / f"model_world_size_{WORLD}_rank_{dist.get_rank()}.pt")
