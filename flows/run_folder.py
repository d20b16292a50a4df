"""A run's id and folder, the time, and what took part. Imports no Prefect: commands that run no flow start without it."""

import platform
import secrets
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("shardwright", "torch", "safetensors", "transformers", "accelerate", "huggingface-hub", "pandas", "pandera", "prefect")


def now() -> str:
    """Return the time.

    Returns:
        ISO 8601 in UTC, to the second.
    """
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return what took part.

    Returns:
        Versions of Python and of the packages, by name.
    """
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def make_run_folder(kind: str, runs: Path) -> tuple[str, Path]:
    """Make the folder of a new run.

    Args:
        kind: begins the run id.
        runs: where run folders go.

    Returns:
        The run id, and the folder.
    """
    run_id = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    folder = (runs / run_id).absolute()
    folder.mkdir(parents=True)
    return run_id, folder
