"""What every rank does when a save is restored at a world size: load its shards by torch's loader, and send them to rank 0 to be digested.

Each tensor is sharded on dim 0 over all ranks (0-d ones are whole on each), so that its bytes in C order are the ranks' shards one after
the other.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from tasks.restoring.accepted import AcceptedReader
from tasks.restoring.jobs import FolderAsk, RestoreJob, TensorAsk, WorldAnswer

State = dict[str, Any]


def restore_at(rank: int, world: int, job: RestoreJob) -> WorldAnswer:
    """Load a save at one world size.

    Args:
        rank: of this process.
        world: how many there are.
        job: what to load.

    Returns:
        The digests; complete on rank 0, empty elsewhere.
    """
    mesh = init_device_mesh("cpu", (world,))
    begun, digests = time.perf_counter(), {}
    for folder in job.folders:
        reader = AcceptedReader(Path(folder.folder))
        for group in _groups(folder.tensors, job.group_nbytes):
            state = {ask.item: _empty(ask, mesh) for ask in group}
            load(state, storage_reader=reader)
            for ask in group:
                digests[ask.key] = _digest(state[ask.item], ask, rank, world)
    seconds = time.perf_counter() - begun
    if world == job.save_at:
        for folder in job.folders:
            _save_again(folder, mesh, Path(job.again) / folder.inner)
    return WorldAnswer(world, digests if rank == 0 else {}, seconds)


def _groups(asks: Sequence[TensorAsk], nbytes: int) -> Iterator[list[TensorAsk]]:
    group: list[TensorAsk] = []
    held = 0
    for ask in asks:
        needed = prod(ask.shape) * 8
        if group and held + needed > nbytes:
            yield group
            group, held = [], 0
        group.append(ask)
        held += needed
    if group:
        yield group


def _empty(ask: TensorAsk, mesh: DeviceMesh) -> torch.Tensor:
    dtype = getattr(torch, ask.dtype)
    if not ask.shape:
        return torch.zeros((), dtype=dtype)
    return zeros(*ask.shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def _digest(tensor: torch.Tensor, ask: TensorAsk, rank: int, world: int) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    mine = local.detach().contiguous().reshape(-1).view(torch.uint8)
    if not ask.shape:
        return hashlib.sha256(mine.numpy().data).hexdigest()
    if rank:
        if len(mine):
            dist.send(mine, 0)
        return ""
    digest = hashlib.sha256(mine.numpy().data)
    rows, row_nbytes = -(-ask.shape[0] // world), prod(ask.shape[1:]) * tensor.itemsize
    for other in range(1, world):
        count = max(0, min(rows, ask.shape[0] - other * rows))
        theirs = torch.empty(count * row_nbytes, dtype=torch.uint8)
        if len(theirs):
            dist.recv(theirs, other)
            digest.update(theirs.numpy().data)
    return digest.hexdigest()


def _save_again(folder: FolderAsk, mesh: DeviceMesh, to: Path) -> None:
    loaded: State = {ask.item: _empty(ask, mesh) for ask in folder.tensors} | {item: None for item, _ in folder.objects}
    load(loaded, storage_reader=AcceptedReader(Path(folder.folder)))
    nested: State = {}
    for item, path in [*((ask.item, ask.path) for ask in folder.tensors), *folder.objects]:
        inner = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = loaded[item]
    save(nested, checkpoint_id=to)
