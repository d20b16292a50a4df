"""A million fragments open and plan within 60 s and 3 GiB. CPU time of one thread, so that a busy machine does not decide."""

from pathlib import Path

import pytest

from tests.benchmarks.million import run


@pytest.mark.slow
def test_a_million_fragments_open_and_plan_within_a_minute_and_3_gib(tmp_path: Path) -> None:
    found = run(tmp_path / "million", layers=1111, chunks=100)
    assert found["fragments"] >= 1_000_000
    assert found["targets"] >= 10_000
    assert found["open_seconds"] + found["plan_seconds"] <= 60
    assert found["peak_bytes"] <= 3 << 30
