"""How fast a quantized export is, as ratios to `cp` of the same bf16 checkpoint, and how much memory it takes.

    python -m tests.benchmarks.quantize [--gb 4] [--rounds 3] [--folder DIR] [--only NAME …]

Medians of interleaved rounds, as tests.benchmarks.rounds runs them. Peak memory is allowed 1.2 GiB.
"""

import tempfile
from functools import partial
from pathlib import Path

from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.planning.quantize import QuantizeRule
from tests.benchmarks.checkpoint import make
from tests.benchmarks.rounds import (
    GB,
    ONE_FILE,
    Measure,
    Measured,
    ask_for,
    export_files,
    print_table,
    read_arguments,
    run_cp,
    run_export,
    run_rounds,
)

LIMITS = {"fp8": 6.0, "fp8-block": 6.0, "int8": 6.0, "int8-w8a8": 6.0, "int4": 10.0}  # allowed ratios to cp


def write(folder: Path, encoding: str, max_file_bytes: int) -> Measured:
    """Plan and execute, in this process."""
    rules = (QuantizeRule("*", encoding),)
    return export_files(folder / "dcp", folder / "out", lambda: ask_for(folder / "hf", max_file_bytes, rules))[0]


def main() -> None:
    """Command line."""
    args = read_arguments(__doc__, gb=4, rounds=3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        source, assets, out = folder / "dcp", folder / "hf", folder / "out"
        if not (assets / "config.json").exists():
            make(folder, int(args.gb * GB), with_peer=False, distinct=True)
        measures: dict[str, Measure] = {"cp": lambda: run_cp(source, out)}
        for name in ENCODINGS:
            measures[f"{name}, 1 GB files"] = partial(write, folder, name, GB)
        for name in ("fp8", "int4"):
            measures[f"{name}, one file"] = partial(write, folder, name, ONE_FILE)
            measures[f"{name}, whole command"] = partial(run_export, source, assets, out, "--quantize", name)
        limits = {name: LIMITS[name.partition(",")[0]] for name in measures if "," in name and "command" not in name}
        files = sorted(source.iterdir())
        found = run_rounds(measures, rounds=args.rounds, only=args.only, out=out, inputs=files)
        print_table(found, limits, sum(path.stat().st_size for path in files))


if __name__ == "__main__":
    main()
