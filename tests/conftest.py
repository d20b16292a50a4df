"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.builders import dcp as dcp_builder


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with every layout of tests.builders.dcp, written once for all workers. Tests copy what they damage."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "written"
    with FileLock(f"{root}.lock"):
        if not (root / "complete").exists():
            root.mkdir()
            dcp_builder.write_all(root)
            (root / "complete").touch()
    return root
