"""Measures how long a DCP checkpoint of a million fragments takes to open and to plan, and how much memory.

    python -m tests.benchmarks.million FOLDER [--tensors 10002 --chunks 100]

The `.metadata` is pickled by torch's own classes; the `.distcp` files are sparse, since planning reads no tensor byte.
"""

import argparse
import json
import pickle
import subprocess
import sys
import time
from math import prod
from pathlib import Path

from tests.benchmarks.llama import Llama

MODEL, FILES = Llama(hidden=400, intermediate=800, heads=4, vocab=1000), 64
RECORD_NBYTES = 1500  # what torch.save puts around a small tensor


def write_checkpoint(folder: Path, layers: int, chunks: int) -> int:
    """Write the checkpoint; returns its number of fragments. Every shape divides by `chunks` = 100."""
    import torch
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    items, storage, ends = {}, {}, [0] * FILES
    for name, shape in MODEL.shapes(layers).items():
        size = torch.Size((shape[0] // chunks, *shape[1:]))
        nbytes = 2 * prod(size) + RECORD_NBYTES
        boxes = [m.ChunkStorageMetadata(torch.Size((n * size[0], *[0] * (len(shape) - 1))), size) for n in range(chunks)]
        items[name] = m.TensorStorageMetadata(m.TensorProperties(torch.bfloat16), torch.Size(shape), boxes)
        for rank, box in enumerate(boxes):
            file = rank % FILES
            storage[m.MetadataIndex(name, box.offsets)] = _StorageInfo(f"__{file}_0.distcp", ends[file], nbytes)
            ends[file] += nbytes
    folder.mkdir(parents=True, exist_ok=True)
    for file, end in enumerate(ends):
        with (folder / f"__{file}_0.distcp").open("wb") as sparse:
            sparse.truncate(end)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(m.Metadata(items, {name: (name,) for name in items}, storage), file)
    return len(storage)


def measure(folder: Path, layers: int) -> dict[str, float]:
    """Open and plan in this process: CPU seconds of each (one thread, all in memory), and the process's peak memory."""
    from tasks.engine.families.llama import LLAMA
    from tasks.engine.formats.readers import open_checkpoint
    from tasks.engine.planning.plan import plan_from_json, plan_to_json
    from tasks.engine.planning.planner import PlanRequest, make_plan

    begun = time.process_time()
    catalog = open_checkpoint(folder).catalog()
    opened = time.process_time()
    dims = LLAMA.dims(MODEL.config(layers))
    plan = make_plan(catalog, PlanRequest(LLAMA, dims, LLAMA.expectation(dims), "F32"))
    planned = time.process_time()
    plan_from_json(plan_to_json(plan))
    stored = time.process_time()
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    peak = int(high.split()[1]) * 1024  # ru_maxrss would be the parent's where that is more
    fragments = len(catalog.table.file)
    return {
        "fragments": fragments,
        "targets": sum(len(file.tensors) for file in plan.files),
        "open_seconds": opened - begun,
        "plan_seconds": planned - opened,
        "json_seconds": stored - planned,
        "peak_bytes": peak,
    }


def run(folder: Path, layers: int, chunks: int) -> dict[str, float]:
    """Write the checkpoint and measure it, each in a process of its own."""
    for step in ("write", "measure"):
        command = [sys.executable, "-m", "tests.benchmarks.million", str(folder), "--step", step]
        done = subprocess.run([*command, "--layers", str(layers), "--chunks", str(chunks)], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=1111)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--step", choices=["all", "write", "measure"], default="all")
    args = parser.parse_args()
    steps = {
        "all": lambda: run(args.folder, args.layers, args.chunks),
        "write": lambda: write_checkpoint(args.folder, args.layers, args.chunks),
        "measure": lambda: measure(args.folder, args.layers),
    }
    print(json.dumps(steps[args.step]()))


if __name__ == "__main__":
    main()
