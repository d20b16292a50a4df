"""How fast a quantized export is, as ratios to `cp` of the same bf16 checkpoint, and how much memory it takes.

    python -m tests.benchmarks.quantize [--gb 4] [--rounds 3] [--folder DIR] [--only NAME …] [--llmcompressor PYTHON]

Medians of interleaved rounds, as tests.benchmarks.rounds runs them. Peak memory is allowed 1.2 GiB.

With `--llmcompressor`, the Python of an environment that has it (torch==2.13.0 llmcompressor==0.14.0.1), its path without a model runs
beside, on a release of the same weights in files of 1 GB, with as many workers: it reads, quantizes and writes, and checks nothing.
"""

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path

from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.planning.quantize import QuantizeRule
from tasks.engine.writing.execute import Verify
from tests.benchmarks.checkpoint import make
from tests.benchmarks.rounds import (
    GB,
    ONE_FILE,
    WORKERS,
    Measure,
    Measured,
    ask_for,
    export_files,
    print_table,
    read_arguments,
    run_cp,
    run_export,
    run_process,
    run_rounds,
)
from tests.builders.hf import write_index

LIMITS = {"fp8": 6.0, "fp8-block": 6.0, "int8": 6.0, "int8-w8a8": 6.0, "int4": 10.0}  # allowed ratios to cp

_PEER = """
import sys
from llmcompressor.entrypoints.model_free import model_free_ptq
source, out, scheme, workers = sys.argv[1:]
model_free_ptq(source, out, scheme=scheme, ignore=["lm_head", "model.embed_tokens"], max_workers=int(workers), device="cpu")
"""


def run_peer(python: str, released: Path, out: Path, scheme: str) -> Measured:
    """llm-compressor's own path without a model."""
    return run_process(python, "-c", _PEER, released, out / "peer", scheme, str(WORKERS))


def release(source: Path, assets: Path, released: Path) -> None:
    """The same weights as a Hugging Face folder, for the peer to read."""
    if not released.exists():
        released.mkdir()
        _, plan = export_files(source, released, lambda: ask_for(assets, GB), Verify.NONE)
        write_index(released, {tensor.name: file.name for file, tensor in plan.tensors()})
        shutil.copyfile(assets / "config.json", released / "config.json")


def write(folder: Path, encoding: str, max_file_bytes: int) -> Measured:
    """Plan and execute, in this process."""
    rules = (QuantizeRule("*", encoding),)
    return export_files(folder / "dcp", folder / "out", lambda: ask_for(folder / "hf", max_file_bytes, rules))[0]


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llmcompressor", help="the Python of an environment that has llm-compressor")


def main() -> None:
    """Command line."""
    args = read_arguments(__doc__, gb=4, rounds=3, extend=_extend)
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
        measures["GGUF q8_0, whole command"] = partial(run_export, source, assets, out, "--gguf", "q8_0")
        if args.llmcompressor:
            released = folder / "released"
            release(source, assets, released)
            for scheme in ("FP8_DYNAMIC", "W4A16"):
                measures[f"llm-compressor {scheme}"] = partial(run_peer, args.llmcompressor, released, out, scheme)
        limits = {name: LIMITS[name.partition(",")[0]] for name in measures if name.partition(",")[0] in LIMITS and "command" not in name}
        files = sorted(source.iterdir())
        found = run_rounds(measures, rounds=args.rounds, only=args.only, out=out, inputs=files)
        print_table(found, limits, sum(path.stat().st_size for path in files))


if __name__ == "__main__":
    main()
