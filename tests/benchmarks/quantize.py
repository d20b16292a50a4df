"""How fast a quantized export is, as ratios to `cp` of the same bf16 checkpoint, and how much memory it takes.

    python -m tests.benchmarks.quantize [--gb 4] [--rounds 3] [--folder DIR] [--only NAME …]

Measured as in tests.benchmarks.export: every measure once a round, page cache warm, no fsync. The CPU column is processor seconds over
seconds: two where both cores are busy throughout.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.choose import choose_family
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.planning.quantize import QuantizeRule
from tasks.engine.writing.execute import execute_file
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.threads import one_torch_thread
from tests.benchmarks.checkpoint import make
from tests.benchmarks.export import GB, WORKERS, Bench, _never

LIMITS = {"fp8": 6.0, "fp8-block": 6.0, "int8": 6.0, "int8-w8a8": 6.0, "int4": 10.0}  # allowed ratios to cp
LARGEST_RSS = 1.2 * 1024  # MiB
Measured = tuple[float, float, float]  # seconds, peak RSS in MiB, processor seconds


class QuantizeBench(Bench):
    """Measures of quantized exports."""

    def write(self, encoding: str, max_file_bytes: int) -> Measured:
        """Plan and execute, in this process."""
        begun, used = time.perf_counter(), time.process_time()
        reader = open_checkpoint(self.folder / "dcp")
        choice = choose_family("auto", self.config, keep_tied_head=False, describe=_never)
        catalog = reader.catalog()
        rules = (QuantizeRule("*", encoding),)
        request = PlanRequest(choice.family, choice.dims, choice.expected, max_file_bytes=max_file_bytes, quantize=rules)
        plan = make_plan(catalog, request)
        source = SourceBytes(reader, catalog)
        with one_torch_thread(), ThreadPoolExecutor(WORKERS) as pool:
            helped = len(plan.files) < WORKERS
            list(pool.map(lambda f: execute_file(f, source, self.out / f.name, with_helper=helped), plan.files))
        source.files.close()
        return time.perf_counter() - begun, 0.0, time.process_time() - used

    def command_for(self, encoding: str) -> Measured:
        """The whole command in a process of its own, start and value checks included, logits skipped."""
        arguments = ["export", str(self.folder / "dcp"), "--assets", str(self.folder / "hf"), "--to", str(self.out / "release")]
        options = [
            "--quantize",
            encoding,
            "--skip",
            "logits=benchmark",
            "--no-fsync",
            "--max-file",
            "1GB",
            "--runs",
            str(self.out / "runs"),
        ]
        used = os.times()
        seconds, peak = self._process([sys.executable, "-m", "flows.cli", *arguments, *options])
        after = os.times()
        return seconds, peak, after.children_user + after.children_system - used.children_user - used.children_system

    def yardstick(self) -> Measured:
        """`cp`."""
        return (*self.cp(), 0.0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; made when absent")
    parser.add_argument("--only", nargs="*", help="measures to run, by the beginning of their names")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "hf/config.json").exists():
            make(folder, int(args.gb * GB), with_peer=False, distinct=True)
        bench = QuantizeBench(folder)
        measures: dict[str, Callable[[], Measured]] = {"cp": bench.yardstick}
        for name in ENCODINGS:
            measures[f"{name}, 1 GB files"] = lambda name=name: bench.write(name, GB)
        for name in ("fp8", "int4"):
            measures[f"{name}, one file"] = lambda name=name: bench.write(name, 1000 * GB)
            measures[f"{name}, whole command"] = lambda name=name: bench.command_for(name)
        if args.only:
            measures = {k: v for k, v in measures.items() if k == "cp" or k.startswith(tuple(args.only))}
        found: dict[str, list[Measured]] = {name: [] for name in measures}
        for _ in range(args.rounds):
            for name, measure in measures.items():
                found[name].append(bench.run(measure))
                print(f"{name}: {found[name][-1][0]:.2f} s", file=sys.stderr)
        _print(found, bench.total)


def _print(found: dict[str, list[Measured]], nbytes: int) -> None:
    yardstick = statistics.median(seconds for seconds, _, _ in found["cp"])
    print(f"{nbytes / GB:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; cp {yardstick:.2f} s")
    print(f"{'measure':<28}{'ratio':>7}{'min':>7}{'limit':>7}{'best s':>8}{'CPU':>6}{'RSS MiB':>9}")
    for name, runs in found.items():
        ratios = sorted(seconds / cp for (seconds, _, _), (cp, _, _) in zip(runs, found["cp"], strict=True))
        encoding = name.partition(",")[0]
        limit = f"{LIMITS[encoding]:.1f}" if encoding in LIMITS and "command" not in name else ""
        busy = statistics.median(used / seconds for seconds, _, used in runs)
        peak = max(rss for _, rss, _ in runs)
        row = f"{name:<28}{statistics.median(ratios):>7.2f}{ratios[0]:>7.2f}{limit:>7}{min(s for s, _, _ in runs):>8.2f}{busy:>6.1f}"
        print(row + (f"{peak:>9.0f}" if peak else ""))


if __name__ == "__main__":
    main()
