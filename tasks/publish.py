"""Publish a stage: fsync, marker, atomic rename. A plain task: Prefect's transactions swallow what goes wrong on commit."""

import hashlib
import json
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.digests import digest_all
from tasks.engine.writing.stage import Stage
from validators.release import MANIFEST_NAME, STAGE_FOLDER

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
    return {**listed, MANIFEST_NAME: hashlib.sha256(manifest).hexdigest()}


@task(name="digest stage", cache_policy=NO_CACHE)
def digest_stage(folder: Path, workers: int) -> dict[str, str]:
    """Read all of a stage again.

    Args:
        folder: the stage.
        workers: files read at a time.

    Returns:
        sha256 in hex, by file name; NO_FILE for links and whatever else is none.
    """
    entries = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()}
    held = {name: path.is_file() and not path.is_symlink() for name, path in entries.items() if not name.startswith(STAGE_FOLDER)}
    digests = digest_all(folder, (name for name, is_plain in held.items() if is_plain), workers)
    return {name: digests.get(name, NO_FILE) for name in held}
