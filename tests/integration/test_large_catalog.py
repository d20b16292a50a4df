"""Tensors of a thousand fragments each open in bounded time and memory. tests/benchmarks/test_million_fragments.py has more of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.large_dcp import write_large

READ = """
import json, sys, time
from pathlib import Path
from tasks.engine.formats.readers import open_checkpoint
started = time.process_time()
catalog = open_checkpoint(Path(sys.argv[1])).catalog()
for fqn, tensor in catalog.tensors.items():
    catalog.check_coverage(fqn, tensor.shape)
rows = len(catalog.table.file)
seconds = time.process_time() - started
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))  # ru_maxrss has the parent's
print(json.dumps([rows, seconds, int(peak.split()[1]) / 2**20]))
"""


@pytest.mark.slow
def test_a_hundred_thousand_fragments_open_within_six_seconds(tmp_path: Path):
    write_large(tmp_path / "save", tensors=100, ranks=1000)
    command = [sys.executable, "-c", READ, str(tmp_path / "save")]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    fragments, seconds, gibibytes = json.loads(said.stdout)
    assert fragments == 100_000
    assert seconds <= 6
    assert gibibytes <= 1
