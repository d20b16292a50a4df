"""Publish a stage: fsync, marker, atomic rename. A plain task: Prefect's transactions swallow what goes wrong on commit."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.writing.stage import Stage
from validators.release import MANIFEST_NAME, STAGE_FOLDER, sha256_of

NO_FILE = "no plain file"


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


def read_listed(folder: Path) -> dict[str, str]:
    """Return what a stage that was just checked consists of.

    Args:
        folder: the stage, its manifest written.

    Returns:
        sha256 in hex, by file name; the manifest's own among them.
    """
    manifest = (folder / MANIFEST_NAME).read_bytes()
    listed = {name: entry["sha256"] for name, entry in json.loads(manifest)["files"].items()}
    return {**listed, MANIFEST_NAME: sha256_of(folder / MANIFEST_NAME)}


@task(name="digest stage", cache_policy=NO_CACHE)
def digest_stage(folder: Path, workers: int) -> dict[str, str]:
    """Read all of a stage again.

    Args:
        folder: the stage.
        workers: files read at a time.

    Returns:
        sha256 in hex, by file name; NO_FILE for links and whatever else is none.
    """
    progress = folder / STAGE_FOLDER
    paths = [path for path in sorted(folder.rglob("*")) if not path.is_relative_to(progress) and (path.is_symlink() or not path.is_dir())]
    with ThreadPoolExecutor(workers) as pool:
        digests = pool.map(lambda path: sha256_of(path) if path.is_file() and not path.is_symlink() else NO_FILE, paths)
        return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, digests, strict=True)}
