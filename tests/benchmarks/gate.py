"""How fast the gate judges a folder by itself, as a ratio to reading it once with sha256, and how much memory the command takes.

    python -m tests.benchmarks.gate --folder DIR [--rounds 5]

DIR is a checkpoint made by tests.benchmarks.checkpoint; its release is made first, by moving bytes only. Interleaved rounds, page cache
warm, all in one warm process with two threads each; the command's memory from outside.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flows.gate import run_gate
from flows.requests import GateRequest
from flows.run import PlainRunner
from tasks.engine.writing.execute import Verify
from tests.benchmarks.export import Bench
from tests.benchmarks.rounds import GB, WORKERS, run_process

LIMIT = 3.0
MEMORY_LIMIT = 900  # MiB


def make_release(folder: Path) -> Path:
    """Write the release of FOLDER's checkpoint."""
    bench = Bench(folder)
    shutil.rmtree(bench.out, ignore_errors=True)
    bench.out.mkdir()
    bench.execute(GB, Verify.NONE)
    shutil.copyfile(folder / "hf/config.json", bench.out / "config.json")
    names = {tensor: path.name for path in sorted(bench.out.glob("*.safetensors")) for tensor in _names(path)}
    total = sum(path.stat().st_size - _data_start(path) for path in bench.out.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (bench.out / "model.safetensors.index.json").write_text(json.dumps(index))
    return bench.out


def _data_start(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _names(path: Path) -> list[str]:
    with path.open("rb") as file:
        header = json.loads(file.read(_data_start(path))[8:])
    return [name for name in header if name != "__metadata__"]


def read_once(release: Path) -> float:
    """The yardstick: sha256 of every weight file; seconds."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(_sha256, release.glob("*.safetensors")))
    return time.perf_counter() - begun


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gate(release: Path) -> float:
    """The whole gate, standalone; seconds."""
    runs = release.parent / "gate-runs"
    begun = time.perf_counter()
    outcome = run_gate(GateRequest(release=release, workers=WORKERS, runs=runs), PlainRunner())
    seconds = time.perf_counter() - begun
    assert outcome.verdict.green, outcome.verdict.line
    shutil.rmtree(runs)
    return seconds


def command_memory(release: Path) -> float:
    """Peak RSS of the command, in MiB."""
    runs = release.parent / "gate-runs"
    measured = run_process(sys.executable, "-m", "flows.cli", "gate", release, "--runs", runs)
    shutil.rmtree(runs)
    return measured.rss_mib


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    release = make_release(args.folder)
    read_once(release), gate(release)
    rounds = [(read_once(release), gate(release)) for _ in range(args.rounds)]
    ratios = sorted(judged / read for read, judged in rounds)
    read = statistics.median(seconds for seconds, _ in rounds)
    print(f"{sum(p.stat().st_size for p in release.iterdir()) / GB:.2f} GB, {os.cpu_count()} cores; read once with sha256 {read:.2f} s")
    print(f"gate, standalone: {statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f}), limit {LIMIT}")
    print(f"peak memory of the command: {command_memory(release):.0f} MiB, limit {MEMORY_LIMIT}")
    shutil.rmtree(release)


if __name__ == "__main__":
    main()
