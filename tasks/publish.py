"""Publish a stage: fsync, marker, atomic rename. A plain task: Prefect's transactions swallow what goes wrong on commit."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.writing.stage import Stage


@task(name="publish", cache_policy=NO_CACHE)
def publish(stage: Stage, *, durable: bool) -> Path:
    """Make a checked stage the release.

    Args:
        stage: complete and green.
        durable: whether to wait until the disk has everything.

    Returns:
        The release's folder.
    """
    stage.commit(durable=durable)
    return stage.destination
