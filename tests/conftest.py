"""Fixtures for all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.builders import dcp as dcp_builder
from tests.builders.commanding import CommandLine

# Fixtures that take twenty seconds or more: the tests that share one run in the same worker.
SHARED_BY_SESSION = ("prefect_server", "command_line")
SHARED_BY_MODULE = frozenset({"served", "home"})


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and pytest what is to be left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one costly fixture together, call them slow, and begin with them: a long group at the end would leave others idle."""
    grouped: set[pytest.Item] = set()
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        group = next((name for name in SHARED_BY_SESSION if name in names), "")
        if not group and names & SHARED_BY_MODULE:
            group = item.nodeid.split("::")[0]
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
            item.add_marker(pytest.mark.slow)
            grouped.add(item)
    items.sort(key=lambda item: item not in grouped)


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


@pytest.fixture(scope="session")
def command_line() -> Iterator[CommandLine]:
    """The real command line, without its start; see tests.builders.commanding."""
    with CommandLine() as running:
        yield running
