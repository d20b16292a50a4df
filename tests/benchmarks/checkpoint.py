"""Makes a multi-GB bf16 checkpoint with torch's own DCP: Llama-like shapes, four gloo ranks, Shard(0). No rank holds a whole tensor.

    python -m tests.benchmarks.checkpoint FOLDER --gb 4

writes FOLDER/dcp, FOLDER/dcp_hf (the same tensors by HuggingFaceStorageWriter, for torch's own consolidation) and FOLDER/hf/config.json.
"""

import argparse
import json
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.benchmarks.llama import Llama

RANKS = 4
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
MODEL = Llama(hidden=2048, intermediate=8192, heads=16, vocab=64000)


def count_layers(nbytes: int) -> int:
    """Layers that make a model of about `nbytes` in bf16."""
    outer = sum(2 * torch.Size(shape).numel() for shape in MODEL.outer().values())
    layer = sum(2 * torch.Size(shape).numel() for shape in MODEL.layer().values())
    return max(1, round((nbytes - outer) / layer))


def write_config(folder: Path, layers: int) -> None:
    """The config.json of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MODEL.config(layers) | {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": MODEL.heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _rank(rank: int, folder: str, layers: int, with_peer: bool, distinct: bool) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(rank)
    pool = torch.randn(1 << 22, generator=generator).mul_(0.02).to(torch.bfloat16)
    state = {}
    made: dict[str, torch.Tensor] = {}
    for name, full in MODEL.shapes(layers).items():
        # Layers take turns with two sets of values, so that 16 GB fit in memory; but safetensors saves no shared ones.
        alike = name if distinct else LAYER_NUMBER.sub(lambda m: f".{int(m[1]) % 2}.", name)
        if alike not in made:
            made[alike] = _fill(full, pool, generator)
        state[name] = DTensor.from_local(made[alike], mesh, [Shard(0)])
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    if with_peer:
        files = dict.fromkeys(state, 1)
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/dcp_hf", fqn_to_index_mapping=files, save_distributed=True))
    dist.destroy_process_group()


def _fill(full: tuple[int, ...], pool: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    local = torch.empty(full[0] // RANKS, *full[1:], dtype=torch.bfloat16)
    for chunk in local.view(-1).split(pool.numel()):
        start = int(torch.randint(0, pool.numel(), (1,), generator=generator))
        chunk.copy_(pool.roll(start)[: chunk.numel()])
    return local + 1 if len(full) == 1 else local


def make(folder: Path, nbytes: int, *, with_peer: bool = True, distinct: bool = False) -> int:
    """Write the checkpoint, and for torch's consolidation its other form; returns its tensor bytes.

    Layers have values of their own when `distinct`, or needed by the other form: an export's checks take alike ones for a fault.
    """
    layers = count_layers(nbytes)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder / "hf", layers)
    mp.spawn(_rank, (str(folder), layers, with_peer, distinct or with_peer), nprocs=RANKS)
    (folder / "rendezvous").unlink(missing_ok=True)
    return sum(2 * torch.Size(shape).numel() for shape in MODEL.shapes(layers).values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--no-peer", action="store_true", help="leave out dcp_hf")
    args = parser.parse_args()
    print(f"{make(args.folder, int(args.gb * 1e9), with_peer=not args.no_peer):,} bytes")


if __name__ == "__main__":
    main()
