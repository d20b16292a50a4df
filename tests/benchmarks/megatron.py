"""How fast a legacy Megatron save becomes a release, as ratios to `cp` of the same bytes, and how much memory it takes.

    python -m tests.benchmarks.megatron [--gb 2.5] [--rounds 5] [--folder DIR] [--only NAME …]

The save is written by hand: a Llama-like bf16 model, TP 2 x PP 2, as Megatron's ranks hold it (every rank's QKV grouped, its gate rows
above its up rows), no optimizer. Medians of interleaved rounds, as tests.benchmarks.rounds runs them. What is written is held against the
whole tensors, bit for bit, before anything is timed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from tasks.engine.writing.execute import Verify
from tests.benchmarks.rounds import (
    GB,
    ONE_FILE,
    Measured,
    ask_for,
    export_files,
    print_table,
    read_arguments,
    run_cp,
    run_export,
    run_rounds,
)
from tests.builders.megatron import Grid, Model, Tensors, config, published, write_legacy

LIMITS = {"move only, 1 GB files": 1.5, "move only, one file": 1.5}


def model_of(nbytes: int) -> Model:
    """A model whose weights take about that many bytes."""
    sizes = {"hidden": 2048, "heads": 16, "groups": 4, "head_dim": 128, "ffn": 5632, "vocab": 32003, "padded": 32256}
    per_layer = 2 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 5632)
    layers = max(2, round((nbytes - 4 * 32003 * 2048) / per_layer / 2) * 2)
    return Model(**sizes, layers=layers, dtype=torch.bfloat16)  # type: ignore[arg-type]  # all counts


def make(folder: Path, nbytes: int) -> None:
    """Write `folder/ckpt` and the config."""
    model = model_of(nbytes)
    write_legacy(folder / "ckpt", model, Grid(tp=2, pp=2, fused_norms=True))
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(config(model) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}))


class Bench:
    """The measures."""

    def __init__(self, folder: Path) -> None:
        self.source, self.assets, self.out, self.proven = folder / "ckpt", folder / "hf", folder / "out", folder / "proven"

    @property
    def files(self) -> list[Path]:
        """The save's."""
        return sorted(self.source.glob("*/*.pt"))

    @property
    def total(self) -> int:
        """Their bytes."""
        return sum(path.stat().st_size for path in self.files)

    def execute(self, max_file_bytes: int, verify: Verify) -> Measured:
        """Plan and execute, in this process."""
        return export_files(self.source, self.out, lambda: ask_for(self.assets, max_file_bytes), verify)[0]

    def prove(self) -> None:
        """Hold what is written against the model's published weights."""
        self.out.mkdir(exist_ok=True)
        self.execute(GB, Verify.FULL)
        found: Tensors = {}
        for path in sorted(self.out.glob("*.safetensors")):
            found |= load_file(path)
        expected = published(model_of(self.total))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)
        self.proven.touch()


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--make", action="store_true", help="write the save and prove what is exported of it, and stop")


def main() -> None:
    """Command line."""
    args = read_arguments(__doc__, gb=2.5, extend=_extend)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        bench = Bench(folder)
        if args.make:
            make(folder, int(args.gb * GB))
            bench.prove()
            return
        if not bench.proven.exists():  # in a process of its own, which keeps its memory out of the rows
            command = ["-m", "tests.benchmarks.megatron", "--folder", str(folder), "--gb", str(args.gb), "--make"]
            subprocess.run([sys.executable, *command], check=True)
        measures = {
            "cp": lambda: run_cp(bench.source, bench.out),
            "move only, 1 GB files": lambda: bench.execute(GB, Verify.NONE),
            "move only, one file": lambda: bench.execute(ONE_FILE, Verify.NONE),
            "sha256 + CRC, 1 GB files": lambda: bench.execute(GB, Verify.FULL),
            "whole command": lambda: run_export(bench.source, bench.assets, bench.out),
        }
        print_table(run_rounds(measures, rounds=args.rounds, only=args.only, out=bench.out, inputs=bench.files), LIMITS, bench.total)


if __name__ == "__main__":
    main()
