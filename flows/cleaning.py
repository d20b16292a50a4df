"""Removing what killed exports left beside their destination."""

import shutil
from pathlib import Path

from reports.errors import RequestError
from tasks.engine.writing.stage import lock_of, stale_stages


def remove_stages(to: Path | None) -> None:
    """List and remove the staging folders of a destination.

    Args:
        to: the destination, or None when it was not given.

    Raises:
        ReleaseError: no destination, or an export to it is running.
    """
    if to is None:
        raise RequestError("is missing", where="--to", remedy="Say which destination's stages to remove.")
    destination = to.absolute()
    stages = stale_stages(destination)
    if not stages:
        print(f"no stage beside {destination}")
        return
    with lock_of(destination):
        for stage in stages:
            shutil.rmtree(stage)
            print(f"removed {stage}")
