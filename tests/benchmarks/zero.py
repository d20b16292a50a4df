"""How fast a ZeRO-3 save becomes fp32 weights, as ratios to `cp` of the same fp32 bytes, and how much memory it takes.

    python -m tests.benchmarks.zero [--rounds 5] [--folder DIR] [--deepspeed PYTHON] [--only NAME …]

The save is written by hand: a Llama-like model of 271 M parameters (16 layers, hidden 1024, vocabulary 32003), bf16 training, 4 ranks,
moments beside the masters: 1.08 GB of fp32 weights in 3.3 GB of files. Every round runs each measure once, interleaved, page cache warm, no
fsync on either side; medians of the rounds are printed as ratios to `cp` of the exported file, of wall time and of processor time (user and
system), which other load disturbs less. With `--deepspeed`, the Python of an environment that has DeepSpeed, its own tool runs beside:

    PYTHON -m deepspeed.utils.zero_to_fp32 SAVE OUT --safe_serialization
"""

import argparse
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
from typing import NamedTuple

import torch

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import Verify, execute_file, verify_shared
from tasks.engine.writing.source_bytes import SourceBytes
from tests.benchmarks.llama import Llama
from tests.builders.zero import Zero, write_zero

GB = 10**9
RANKS, LAYERS, WORKERS = 4, 16, 2
MODEL = Llama(hidden=1024, intermediate=2816, heads=16, vocab=32003)
LIMITS = {"move only, one file": 1.3, "move only, 200 MB files": 1.3}


class Measured(NamedTuple):
    """One run. `rss_mib` is the peak of a process of its own, 0 where none was measured."""

    seconds: float
    cpu_seconds: float
    rss_mib: float = 0.0


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
        self.folder, self.out = folder, folder / "out"

    def cp(self) -> Measured:
        """The yardstick: the exported bytes, copied."""
        return self._process(["cp", "--reflink=never", str(self.folder / "fp32.safetensors"), str(self.out / "copy")])._replace(rss_mib=0.0)

    def export(self, max_file_bytes: int, verify: Verify) -> Measured:
        """Open, plan and write, in this process."""
        begun, cpu_begun = time.perf_counter(), time.process_time()
        reader = open_checkpoint(self.folder / "ckpt")
        catalog = reader.catalog()
        plan = make_plan(catalog, PlanRequest(max_file_bytes=max_file_bytes, dtype="F32"))
        source = SourceBytes(reader, catalog)
        helped = len(plan.files) < WORKERS
        with ThreadPoolExecutor(WORKERS) as pool:
            records = list(pool.map(lambda f: execute_file(f, source, self.out / f.name, verify=verify, with_helper=helped), plan.files))
        if verify is Verify.FULL:
            verify_shared(plan.files, tuple(records), source)
        source.files.close()
        return Measured(time.perf_counter() - begun, time.process_time() - cpu_begun)

    def process(self, max_file: str) -> Measured:
        """The same in a process of its own, for its memory."""
        code = f"import sys; sys.argv = ['zero', '--folder', {str(self.folder)!r}, '--alone', {max_file!r}]"
        return self._process([sys.executable, "-c", f"{code}; from tests.benchmarks.zero import main; main()"])

    def deepspeed(self, python: str) -> Measured:
        """DeepSpeed's own tool."""
        tool = [python, "-m", "deepspeed.utils.zero_to_fp32", str(self.folder / "ckpt"), str(self.out), "--safe_serialization"]
        return self._process(tool)

    def run(self, measure: Callable[[], Measured]) -> Measured:
        """One measure, from an empty output folder."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
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
        if status:
            raise RuntimeError(errors.decode()[-2000:])
        return Measured(time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the save is kept; made when absent")
    parser.add_argument("--deepspeed", help="the Python of an environment that has DeepSpeed")
    parser.add_argument("--only", nargs="*", help="measures to run, by the beginning of their names")
    parser.add_argument("--alone", type=int, help="export once with files of that many bytes, and stop; for measuring memory")
    parser.add_argument(
        "--make", action="store_true", help="write the save, and stop; a process of its own keeps its memory out of the rows"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        bench = Bench(folder)
        if args.make:
            make(folder)
            return
        if args.alone:
            bench.export(args.alone, Verify.FULL)
            return
        if not (folder / "ckpt").exists():
            subprocess.run([sys.executable, "-m", "tests.benchmarks.zero", "--folder", str(folder), "--make"], check=True)
        bench.out.mkdir(exist_ok=True)
        bench.export(1000 * GB, Verify.NONE)
        (bench.out / "model.safetensors").replace(folder / "fp32.safetensors")
        measures: dict[str, Callable[[], Measured]] = {
            "cp": bench.cp,
            "move only, one file": lambda: bench.export(1000 * GB, Verify.NONE),
            "move only, 200 MB files": lambda: bench.export(GB // 5, Verify.NONE),
            "sha256 + CRC, one file": lambda: bench.export(1000 * GB, Verify.FULL),
            "sha256 + CRC, 200 MB files": lambda: bench.export(GB // 5, Verify.FULL),
            "in a process of its own": lambda: bench.process(str(1000 * GB)),
            **({"zero_to_fp32": lambda: bench.deepspeed(args.deepspeed)} if args.deepspeed else {}),
        }
        if args.only:
            measures = {name: measure for name, measure in measures.items() if name == "cp" or name.startswith(tuple(args.only))}
        for measure in measures.values():
            bench.run(measure)
        found: dict[str, list[Measured]] = {name: [] for name in measures}
        for _ in range(args.rounds):
            for name, measure in measures.items():
                found[name].append(bench.run(measure))
        _print(found, (folder / "fp32.safetensors").stat().st_size)


def _print(found: dict[str, list[Measured]], nbytes: int) -> None:
    yardstick = statistics.median(run.seconds for run in found["cp"])
    print(f"{nbytes / GB:.2f} GB of fp32, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; cp {yardstick:.2f} s")
    print(f"{'measure':<28}{'ratio':>7}{'min':>7}{'max':>7}{'limit':>7}{'CPU':>7}{'best s':>8}{'RSS MiB':>9}")
    for name, runs in found.items():
        pairs = list(zip(runs, found["cp"], strict=True))
        ratios = sorted(run.seconds / cp.seconds for run, cp in pairs)
        cpu = statistics.median(run.cpu_seconds / cp.cpu_seconds for run, cp in pairs)
        limit = f"{LIMITS[name]:.1f}" if name in LIMITS else ""
        row = f"{name:<28}{statistics.median(ratios):>7.2f}{ratios[0]:>7.2f}{ratios[-1]:>7.2f}{limit:>7}{cpu:>7.2f}"
        peak = max(run.rss_mib for run in runs)
        print(f"{row}{min(run.seconds for run in runs):>8.2f}" + (f"{peak:>9.0f}" if peak else ""))


if __name__ == "__main__":
    main()
