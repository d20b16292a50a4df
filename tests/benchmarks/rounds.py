"""What the benchmarks of writing share: what is measured, how often and in which order, and the table that is printed.

Every round runs each measure once, so that a slow minute of a shared machine meets all of them; ratios are to the `cp` of the same round.
The page cache is warm and nothing is synced while the time runs, on neither side. The CPU column compares processor time, user and system,
which other load disturbs less.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.choose import choose_family
from tasks.engine.planning.plan import ExportPlan
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.planning.quantize import QuantizeRule
from tasks.engine.writing.execute import Verify, execute_file, verify_shared
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.threads import one_torch_thread

GB = 10**9
ONE_FILE = 1000 * GB  # no file grows that large
WORKERS = 2


class Measured(NamedTuple):
    """One run. `rss_mib` is the peak of a process of its own, 0 where none was measured."""

    seconds: float
    cpu_seconds: float
    rss_mib: float = 0.0


Measure = Callable[[], Measured]


def read_arguments(
    usage: str, *, gb: float | None = None, rounds: int = 5, extend: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """Read the command line of a benchmark.

    Args:
        usage: its docstring.
        gb: how many GB of weights, unless `--gb` says; None where the size is fixed.
        rounds: how many, unless `--rounds` says.
        extend: adds options of its own.
    """
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    if gb is not None:
        parser.add_argument("--gb", type=float, default=gb, help="of weights")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; made when absent")
    parser.add_argument("--only", nargs="*", help="measures to run, by the beginning of their names")
    if extend is not None:
        extend(parser)
    return parser.parse_args()


def run_rounds(
    measures: Mapping[str, Measure], *, rounds: int, only: list[str] | None, out: Path, inputs: Iterable[Path]
) -> dict[str, list[Measured]]:
    """Run every measure once to warm up, then `rounds` times.

    Args:
        measures: by name; "cp" is the yardstick and always runs.
        rounds: 1 or more.
        only: beginnings of the names to run; None for all.
        out: where measures write; empty before each, gone behind it.
        inputs: files that are kept in the page cache.
    """
    chosen = {name: run for name, run in measures.items() if only is None or name == "cp" or name.startswith(tuple(only))}
    kept = list(inputs)
    found: dict[str, list[Measured]] = {name: [] for name in chosen}
    for turn in range(rounds + 1):
        for name, measure in chosen.items():
            with _prepared(out, kept):
                measured = measure()
            print(f"{f'round {turn}' if turn else 'warm-up'}: {name}: {measured.seconds:.2f} s", file=sys.stderr)
            if turn:
                found[name].append(measured)
    return found


def print_table(found: Mapping[str, list[Measured]], limits: Mapping[str, float], nbytes: int) -> None:
    """Print the ratios to `cp`.

    Args:
        found: runs by measure, "cp" among them.
        limits: measure to the largest ratio allowed.
        nbytes: what `cp` copied.
    """
    yardstick = statistics.median(run.seconds for run in found["cp"])
    print(f"{nbytes / GB:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; cp {yardstick:.2f} s")
    print(f"{'measure':<32}{'ratio':>7}{'min':>7}{'max':>7}{'limit':>7}{'CPU':>7}{'best s':>8}{'RSS MiB':>9}")
    for name, runs in found.items():
        pairs = list(zip(runs, found["cp"], strict=True))
        ratios = sorted(run.seconds / cp.seconds for run, cp in pairs)
        cpu = statistics.median(run.cpu_seconds / cp.cpu_seconds for run, cp in pairs)
        limit = f"{limits[name]:.1f}" if name in limits else ""
        row = f"{name:<32}{statistics.median(ratios):>7.2f}{ratios[0]:>7.2f}{ratios[-1]:>7.2f}{limit:>7}{cpu:>7.2f}"
        peak = max(run.rss_mib for run in runs)
        print(f"{row}{min(run.seconds for run in runs):>8.2f}" + (f"{peak:>9.0f}" if peak else ""))


def start_clocks() -> Measure:
    """Start the clocks of this process; what is returned reads them."""
    begun, used = time.perf_counter(), time.process_time()
    return lambda: Measured(time.perf_counter() - begun, time.process_time() - used)


def run_process(*command: str | Path) -> Measured:
    """Run a process of its own, and say what the kernel counted of it and of those it waited for.

    Raises:
        RuntimeError: it failed; the message is the end of what it said.
    """
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    if status:
        raise RuntimeError(errors.decode()[-2000:])
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def run_cp(source: Path, out: Path) -> Measured:
    """The yardstick."""
    return run_process("cp", "-r", "--reflink=never", source, out / "copy")._replace(rss_mib=0.0)


def run_export(source: Path, assets: Path, out: Path, *options: str) -> Measured:
    """The whole command, start included, logits skipped."""
    fixed = ("--skip", "logits=benchmark", "--no-fsync", "--max-file", "1GB", "--runs", out / "runs")
    return run_process(sys.executable, "-m", "flows.cli", "export", source, "--assets", assets, "--to", out / "release", *fixed, *options)


def ask_for(assets: Path, max_file_bytes: int, quantize: tuple[QuantizeRule, ...] = ()) -> PlanRequest:
    """Return what a benchmark asks a plan for; its model's family is always known."""
    choice = choose_family("auto", json.loads((assets / "config.json").read_text()), keep_tied_head=False, describe=_never)
    return PlanRequest(choice.family, choice.dims, choice.expected, max_file_bytes=max_file_bytes, quantize=quantize)


def export_files(checkpoint: Path, out: Path, ask: Callable[[], PlanRequest], verify: Verify = Verify.FULL) -> tuple[Measured, ExportPlan]:
    """Open, plan and write as an export does, in this process on WORKERS threads.

    Args:
        checkpoint: the source.
        out: gets the files.
        ask: says what to write; timed too.
        verify: whether to digest and check on the way.
    """
    measured = start_clocks()
    reader = open_checkpoint(checkpoint)
    catalog = reader.catalog()
    plan = make_plan(catalog, ask())
    source = SourceBytes(reader, catalog)
    helped = len(plan.files) < WORKERS
    with one_torch_thread(), ThreadPoolExecutor(WORKERS) as pool:
        records = pool.map(lambda f: execute_file(f, source, out / f.name, verify=verify, with_helper=helped), plan.files)
        verify_shared(plan.files, tuple(records), source)
    source.files.close()
    return measured(), plan


@contextmanager
def _prepared(out: Path, inputs: Iterable[Path]) -> Iterator[None]:
    # An empty folder, the input in the page cache; what the measure before left to be written must not slow this one.
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for path in inputs:
        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
    os.sync()
    try:
        yield
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _never(_: object) -> NoReturn:
    raise AssertionError("the benchmark's model has a family")
