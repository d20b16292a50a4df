"""How fast a ZeRO-3 save becomes fp32 weights, as ratios to `cp` of the same fp32 bytes, and how much memory it takes.

    python -m tests.benchmarks.zero [--rounds 5] [--folder DIR] [--deepspeed PYTHON] [--only NAME …]

The save is written by hand: a Llama-like model of 271 M parameters (16 layers, hidden 1024, vocabulary 32003), bf16 training, 4 ranks,
moments beside the masters: 1.08 GB of fp32 weights in 3.3 GB of files. Medians of interleaved rounds, as tests.benchmarks.rounds runs them,
beside `cp` of the exported file. With `--deepspeed`, the Python of an environment that has DeepSpeed, its own tool runs beside:

    PYTHON -m deepspeed.utils.zero_to_fp32 SAVE OUT --safe_serialization
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tasks.engine.planning.planner import PlanRequest
from tasks.engine.writing.execute import Verify
from tests.benchmarks.llama import Llama
from tests.benchmarks.rounds import (
    GB,
    ONE_FILE,
    Measured,
    export_files,
    print_table,
    read_arguments,
    run_cp,
    run_process,
    run_rounds,
)
from tests.builders.zero import Zero, write_zero

RANKS, LAYERS = 4, 16
MODEL = Llama(hidden=1024, intermediate=2816, heads=16, vocab=32003)
LIMITS = {"move only, one file": 1.3, "move only, 200 MB files": 1.3}


class _Cheap(Zero):
    # Moments of the masters' own values: they are indexed, never read.
    def moment(self, _slot: str, name: str) -> torch.Tensor:
        return self.masters[name]


def make(folder: Path) -> None:
    """Write the save under `folder/ckpt`."""
    generator = torch.Generator().manual_seed(3)
    masters = {name: torch.randn(shape, generator=generator) for name, shape in MODEL.shapes(LAYERS).items()}
    write_zero(folder / "ckpt", _Cheap(masters, stage=3, world=RANKS))


class Bench:
    """The measures."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source, self.weights, self.out = folder, folder / "ckpt", folder / "fp32.safetensors", folder / "out"

    def export(self, max_file_bytes: int, verify: Verify) -> Measured:
        """Open, plan and write, in this process."""
        return export_files(self.source, self.out, lambda: PlanRequest(max_file_bytes=max_file_bytes, dtype="F32"), verify)[0]

    def process(self, max_file_bytes: int) -> Measured:
        """The same in a process of its own, for its memory."""
        return run_process(sys.executable, "-m", "tests.benchmarks.zero", "--folder", self.folder, "--alone", str(max_file_bytes))

    def deepspeed(self, python: str) -> Measured:
        """DeepSpeed's own tool."""
        return run_process(python, "-m", "deepspeed.utils.zero_to_fp32", self.source, self.out, "--safe_serialization")

    def prepare(self) -> None:
        """Write what is not there yet: the save, and its weights for `cp`."""
        if not self.source.exists():
            subprocess.run([sys.executable, "-m", "tests.benchmarks.zero", "--folder", str(self.folder), "--make"], check=True)
        if not self.weights.exists():
            self.out.mkdir(exist_ok=True)
            self.export(ONE_FILE, Verify.NONE)
            (self.out / "model.safetensors").replace(self.weights)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed", help="the Python of an environment that has DeepSpeed")
    parser.add_argument("--alone", type=int, help="export once with files of that many bytes, and stop; for measuring memory")
    parser.add_argument(
        "--make", action="store_true", help="write the save, and stop; a process of its own keeps its memory out of the rows"
    )


def main() -> None:
    """Command line."""
    args = read_arguments(__doc__, extend=_extend)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.folder or Path(scratch))
        if args.make:
            make(bench.folder)
            return
        if args.alone:
            bench.export(args.alone, Verify.FULL)
            return
        bench.prepare()
        measures = {
            "cp": lambda: run_cp(bench.weights, bench.out),
            "move only, one file": lambda: bench.export(ONE_FILE, Verify.NONE),
            "move only, 200 MB files": lambda: bench.export(GB // 5, Verify.NONE),
            "sha256 + CRC, one file": lambda: bench.export(ONE_FILE, Verify.FULL),
            "sha256 + CRC, 200 MB files": lambda: bench.export(GB // 5, Verify.FULL),
            "in a process of its own": lambda: bench.process(ONE_FILE),
            **({"zero_to_fp32": lambda: bench.deepspeed(args.deepspeed)} if args.deepspeed else {}),
        }
        found = run_rounds(measures, rounds=args.rounds, only=args.only, out=bench.out, inputs=sorted(bench.source.rglob("*.pt")))
        print_table(found, LIMITS, bench.weights.stat().st_size)


if __name__ == "__main__":
    main()
