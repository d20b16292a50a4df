"""How fast an export is, as ratios to `cp` of the same checkpoint, and how much memory it takes.

    python -m tests.benchmarks.export [--gb 4] [--rounds 5] [--folder DIR] [--only NAME …]

Medians of interleaved rounds, as tests.benchmarks.rounds runs them. `plan` + `execute` and the checks are timed inside one warm process;
the whole command and the peers from outside.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from tasks.engine.planning.plan import plan_to_json
from tasks.engine.writing.execute import Verify
from tasks.measure import measure
from tests.benchmarks.checkpoint import make
from tests.benchmarks.rounds import (
    GB,
    ONE_FILE,
    WORKERS,
    Measured,
    ask_for,
    export_files,
    print_table,
    read_arguments,
    run_cp,
    run_export,
    run_process,
    run_rounds,
    start_clocks,
)

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
    """The measures."""

    def __init__(self, folder: Path) -> None:
        self.source, self.assets, self.out = folder / "dcp", folder / "hf", folder / "out"
        self.peer_source, self.plan, self.names = folder / "dcp_hf", folder / "plan.json", folder / "names.json"
        self.files = sorted(self.source.iterdir())
        self.total = sum(path.stat().st_size for path in self.files)

    def execute(self, max_file_bytes: int, verify: Verify) -> Measured:
        """Plan and execute, in this process."""
        measured, plan = export_files(self.source, self.out, lambda: ask_for(self.assets, max_file_bytes), verify)
        self.plan.write_text(plan_to_json(plan))
        return measured

    def checks(self) -> Measured:
        """Every check of values: the release re-read, measured, and held against the second path."""
        self.execute(GB, Verify.NONE)
        measured = start_clocks()
        found = measure(self.out, plan_path=self.plan, source_roots=(self.source,), workers=WORKERS)
        taken = measured()
        assert found.witness.heard
        assert int(found.values["differing"].sum()) == 0
        return taken

    def peer(self, name: str) -> Measured:
        """One of torch's own tools."""
        plan = json.loads(self.plan.read_text())
        self.names.write_text(json.dumps([t["name"] for f in plan["files"] for t in f["tensors"]]))
        code = PEERS[name].format(dcp=str(self.source), dcp_hf=str(self.peer_source), names=str(self.names), out=str(self.out))
        return run_process(sys.executable, "-c", code)


def main() -> None:
    """Command line."""
    args = read_arguments(__doc__, gb=4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "hf/config.json").exists():
            make(folder, int(args.gb * GB))
        bench = Bench(folder)
        measures = {
            "cp": lambda: run_cp(bench.source, bench.out),
            "move only, 1 GB files": lambda: bench.execute(GB, Verify.NONE),
            "move only, one file": lambda: bench.execute(ONE_FILE, Verify.NONE),
            "sha256 + CRC, 1 GB files": lambda: bench.execute(GB, Verify.FULL),
            "sha256 + CRC, one file": lambda: bench.execute(ONE_FILE, Verify.FULL),
            "all value checks": bench.checks,
            "whole command": lambda: run_export(bench.source, bench.assets, bench.out),
            **{name: partial(bench.peer, name) for name in PEERS},
        }
        print_table(run_rounds(measures, rounds=args.rounds, only=args.only, out=bench.out, inputs=bench.files), LIMITS, bench.total)


if __name__ == "__main__":
    main()
