"""How fast a legacy Megatron save becomes a release, as ratios to `cp` of the same bytes, and how much memory it takes.

    python -m tests.benchmarks.megatron [--gb 2.5] [--rounds 5] [--folder DIR]

The save is written by hand: a Llama-like bf16 model, TP 2 x PP 2, as Megatron's ranks hold it (every rank's QKV grouped, its gate rows
above its up rows), no optimizer. Every round runs each measure once, interleaved, page cache warm, no fsync on either side; medians of the
rounds are printed as ratios to `cp` of the save. What is written is held against the whole tensors, bit for bit, before anything is timed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.choose import choose_family
from tasks.engine.planning.plan import plan_to_json
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import Verify, execute_file
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.megatron import Grid, Model, Tensors, config, published, write_legacy

GB = 10**9
WORKERS = 2
LIMITS = {"move only, 1 GB files": 1.5, "move only, one file": 1.5}
Measured = tuple[float, float]  # seconds, and peak RSS in MiB where a process of its own was measured


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
        self.folder, self.out = folder, folder / "out"
        self.config = json.loads((folder / "hf/config.json").read_text())
        self.files = sorted((folder / "ckpt").glob("*/*.pt"))

    def cp(self) -> Measured:
        """The yardstick."""
        return self._process(["cp", "-r", "--reflink=never", str(self.folder / "ckpt"), str(self.out / "copy")])[0], 0.0

    def execute(self, max_file_bytes: int, verify: Verify) -> Measured:
        """Plan and execute, in this process."""
        begun = time.perf_counter()
        reader = open_checkpoint(self.folder / "ckpt")
        catalog = reader.catalog()
        choice = choose_family("auto", self.config, keep_tied_head=False, describe=_never)
        plan = make_plan(catalog, PlanRequest(choice.family, choice.dims, choice.expected, max_file_bytes=max_file_bytes))
        source = SourceBytes(reader, catalog)
        helped = len(plan.files) < WORKERS
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda f: execute_file(f, source, self.out / f.name, verify=verify, with_helper=helped), plan.files))
        source.files.close()
        seconds = time.perf_counter() - begun
        (self.folder / "plan.json").write_text(plan_to_json(plan))
        return seconds, 0.0

    def command(self) -> Measured:
        """The whole command, start included, logits skipped."""
        arguments = ["export", str(self.folder / "ckpt"), "--assets", str(self.folder / "hf"), "--to", str(self.out / "release")]
        options = ["--skip", "logits=benchmark", "--no-fsync", "--max-file", "1GB", "--runs", str(self.out / "runs")]
        return self._process([sys.executable, "-m", "flows.cli", *arguments, *options])

    def prove(self) -> None:
        """Hold what is written against the model's published weights."""
        self.out.mkdir(exist_ok=True)
        self.execute(GB, Verify.FULL)
        found: Tensors = {}
        for path in sorted(self.out.glob("*.safetensors")):
            found |= load_file(path)
        expected = published(model_of(sum(path.stat().st_size for path in self.files)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)

    def run(self, measure: Callable[[], Measured]) -> Measured:
        """One measure, from an empty output folder and with the input in the page cache."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for path in self.files:
            subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
        os.sync()  # what the measure before left to be written must not slow this one
        try:
            return measure()
        finally:
            shutil.rmtree(self.out, ignore_errors=True)

    def _process(self, command: list[str]) -> Measured:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        if status:
            raise RuntimeError(errors.decode()[-2000:])
        return seconds, usage.ru_maxrss / 1024


def _never(_: object) -> object:
    raise AssertionError("the benchmark's model has a family")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the save is kept; made when absent")
    parser.add_argument("--make", action="store_true", help="write the save and prove what is exported of it, and stop")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if args.make:
            make(folder, int(args.gb * GB))
            Bench(folder).prove()
            return
        if not (folder / "plan.json").exists():  # in a process of its own, which keeps its memory out of the rows
            command = ["-m", "tests.benchmarks.megatron", "--folder", str(folder), "--gb", str(args.gb), "--make"]
            subprocess.run([sys.executable, *command], check=True)
        bench = Bench(folder)
        measures: dict[str, Callable[[], Measured]] = {
            "cp": bench.cp,
            "move only, 1 GB files": lambda: bench.execute(GB, Verify.NONE),
            "move only, one file": lambda: bench.execute(1000 * GB, Verify.NONE),
            "sha256 + CRC, 1 GB files": lambda: bench.execute(GB, Verify.FULL),
            "whole command": bench.command,
        }
        for measure in measures.values():  # warm-up: page cache, imports, Prefect's home
            bench.run(measure)
        found: dict[str, list[Measured]] = {name: [] for name in measures}
        for _ in range(args.rounds):
            for name, measure in measures.items():
                found[name].append(bench.run(measure))
        _print(found, sum(path.stat().st_size for path in bench.files))


def _print(found: dict[str, list[Measured]], nbytes: int) -> None:
    yardstick = statistics.median(seconds for seconds, _ in found["cp"])
    print(f"{nbytes / GB:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; cp {yardstick:.2f} s")
    print(f"{'measure':<28}{'ratio':>7}{'min':>7}{'max':>7}{'limit':>7}{'best s':>8}{'RSS MiB':>9}")
    for name, runs in found.items():
        ratios = sorted(seconds / cp for (seconds, _), (cp, _) in zip(runs, found["cp"], strict=True))
        limit = f"{LIMITS[name]:.1f}" if name in LIMITS else ""
        row = f"{name:<28}{statistics.median(ratios):>7.2f}{ratios[0]:>7.2f}{ratios[-1]:>7.2f}{limit:>7}{min(s for s, _ in runs):>8.2f}"
        peak = max(rss for _, rss in runs)
        print(row + (f"{peak:>9.0f}" if peak else ""))


if __name__ == "__main__":
    main()
