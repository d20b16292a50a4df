"""How fast an export is, as ratios to `cp` of the same checkpoint, and how much memory it takes.

    python -m tests.benchmarks.export [--gb 4] [--rounds 5] [--folder DIR] [--only NAME …]

Every round runs each measure once, interleaved, page cache warm, no fsync on either side; medians of the rounds are printed as ratios to
`cp -r --reflink=never`. `plan` + `execute` and the checks are timed inside one warm process; the whole command and the peers from outside.
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

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.choose import choose_family
from tasks.engine.planning.plan import plan_to_json
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import Verify, execute_file
from tasks.engine.writing.source_bytes import SourceBytes
from tests.benchmarks.checkpoint import make

GB = 10**9
WORKERS = 2
LIMITS = {  # measure: allowed ratio to cp
    "move only, 1 GB files": 1.2,
    "move only, one file": 1.2,
    "sha256 + CRC, 1 GB files": 2.5,
    "sha256 + CRC, one file": 2.5,
    "all value checks": 3.0,
    "whole command": 8.0,
}
PEERS = {
    "dcp_to_torch_save": "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f({dcp!r}, {out!r} + '/all.pt')",
    "consolidate_safetensors_files": (
        "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as f; import os;"
        " names = {{k: 1 for k in __import__('json').load(open({names!r}))}}; f({dcp_hf!r}, {out!r}, names, num_threads=2)"
    ),
}


class Bench:
    """The measures; each returns seconds, and peak RSS in MiB where a process of its own was measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.config = json.loads((folder / "hf/config.json").read_text())
        self.total = sum(f.stat().st_size for f in (folder / "dcp").iterdir())

    def cp(self) -> tuple[float, float]:
        """The yardstick."""
        seconds, _ = self._process(["cp", "-r", "--reflink=never", str(self.folder / "dcp"), str(self.out / "copy")])
        return seconds, 0.0

    def execute(self, max_file_bytes: int, verify: Verify) -> tuple[float, float]:
        """Plan and execute, in this process."""
        begun = time.perf_counter()
        reader = open_checkpoint(self.folder / "dcp")
        choice = choose_family("auto", self.config, keep_tied_head=False, describe=_never)
        catalog = reader.catalog()
        request = PlanRequest(choice.family, choice.dims, choice.expected, max_file_bytes=max_file_bytes)
        plan = make_plan(catalog, request)
        source = SourceBytes(reader, catalog)
        with ThreadPoolExecutor(WORKERS) as pool:
            helped = len(plan.files) < WORKERS
            list(pool.map(lambda f: execute_file(f, source, self.out / f.name, verify=verify, with_helper=helped), plan.files))
        source.files.close()
        seconds = time.perf_counter() - begun
        (self.folder / "plan.json").write_text(plan_to_json(plan))
        return seconds, 0.0

    def checks(self) -> tuple[float, float]:
        """Every check of values: the release re-read, measured, and held against the second path."""
        from tasks.measure import measure

        self.execute(GB, Verify.NONE)
        begun = time.perf_counter()
        found = measure(self.out, plan_path=self.folder / "plan.json", source_roots=(self.folder / "dcp",), workers=WORKERS)
        seconds = time.perf_counter() - begun
        assert found.witness.heard
        assert int(found.values["differing"].sum()) == 0
        return seconds, 0.0

    def command(self) -> tuple[float, float]:
        """The whole command, start included, logits skipped."""
        arguments = ["export", str(self.folder / "dcp"), "--assets", str(self.folder / "hf"), "--to", str(self.out / "release")]
        options = ["--skip", "logits=benchmark", "--no-fsync", "--max-file", "1GB", "--runs", str(self.out / "runs")]
        return self._process([sys.executable, "-m", "flows.cli", *arguments, *options])

    def peer(self, name: str) -> tuple[float, float]:
        """One of torch's own tools."""
        names = self.folder / "names.json"
        plan = json.loads((self.folder / "plan.json").read_text())
        names.write_text(json.dumps([t["name"] for f in plan["files"] for t in f["tensors"]]))
        dcp, dcp_hf = str(self.folder / "dcp"), str(self.folder / "dcp_hf")
        code = PEERS[name].format(dcp=dcp, dcp_hf=dcp_hf, names=str(names), out=str(self.out))
        return self._process([sys.executable, "-c", code])

    def run(self, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """One measure, from an empty output folder and with the input in the page cache."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for path in (self.folder / "dcp").iterdir():  # keep the input in the page cache
            subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
        os.sync()  # what the measure before left to be written must not slow this one
        try:
            return measure()
        finally:
            shutil.rmtree(self.out, ignore_errors=True)

    def _process(self, command: list[str]) -> tuple[float, float]:
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
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; made when absent")
    parser.add_argument("--only", nargs="*", help="measures to run, by the beginning of their names")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "hf/config.json").exists():
            make(folder, int(args.gb * GB))
        bench = Bench(folder)
        measures: dict[str, Callable[[], tuple[float, float]]] = {
            "cp": bench.cp,
            "move only, 1 GB files": lambda: bench.execute(GB, Verify.NONE),
            "move only, one file": lambda: bench.execute(1000 * GB, Verify.NONE),
            "sha256 + CRC, 1 GB files": lambda: bench.execute(GB, Verify.FULL),
            "sha256 + CRC, one file": lambda: bench.execute(1000 * GB, Verify.FULL),
            "all value checks": bench.checks,
            "whole command": bench.command,
            **{name: (lambda name=name: bench.peer(name)) for name in PEERS},
        }
        if args.only:
            measures = {k: v for k, v in measures.items() if k == "cp" or k.startswith(tuple(args.only))}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in measures}
        for name, measure in measures.items():  # warm-up: page cache, imports, Prefect's home
            bench.run(measure)
            print(f"warm: {name}", file=sys.stderr)
        for _ in range(args.rounds):
            for name, measure in measures.items():
                found[name].append(bench.run(measure))
        _print(found, bench.total)


def _print(found: dict[str, list[tuple[float, float]]], nbytes: int) -> None:
    yardstick = statistics.median(seconds for seconds, _ in found["cp"])
    print(f"{nbytes / GB:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; cp {yardstick:.2f} s")
    print(f"{'measure':<32}{'ratio':>7}{'min':>7}{'max':>7}{'limit':>7}{'best s':>8}{'RSS MiB':>9}")
    for name, runs in found.items():
        ratios = sorted(seconds / cp for (seconds, _), (cp, _) in zip(runs, found["cp"], strict=True))
        peak = max(rss for _, rss in runs)
        limit = f"{LIMITS[name]:.1f}" if name in LIMITS else ""
        row = f"{name:<32}{statistics.median(ratios):>7.2f}{ratios[0]:>7.2f}{ratios[-1]:>7.2f}{limit:>7}{min(s for s, _ in runs):>8.2f}"
        print(row + (f"{peak:>9.0f}" if peak else ""))


if __name__ == "__main__":
    main()
