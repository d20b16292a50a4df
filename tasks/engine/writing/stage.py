"""From a staging folder to a committed release: all of it or nothing.

    .OUT.shardwright-<plan digest>/        the stage, beside OUT, on the same file system
        .progress/<file>.json              one record per finished file: a rerun of the same plan goes on from these
    OUT/                                   appears by one no-replace rename
        shardwright.json                   manifest
        shardwright.committed              commit marker: names the manifest's sha256; written last, before the rename

The marker is written, and everything fsynced, before the rename: so OUT, whenever it exists, is whole (docs/decisions/0002).
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from reports.errors import CommitError
from tasks.engine.planning.plan import FilePlan
from tasks.engine.writing.execute import FileRecord
from tasks.engine.writing.lock import ProcessLock, refuse_taken
from validators.release import MANIFEST_NAME, MARKER_NAME, sha256_of

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_PROGRESS = ".progress"

_RECORDS = TypeAdapter(FileRecord)

Step = Callable[[str], None]


class Stage:
    """The staging folder of one plan for one destination. Made by `create`.

    Args:
        destination: where the release will be.
        plan_digest: identifies the plan.
        reached: called with the name of each step; tests kill the process there.
    """

    def __init__(self, destination: Path, plan_digest: str, reached: Step) -> None:
        self.destination = destination
        self.folder = destination.parent / f".{destination.name}.shardwright-{plan_digest[:16]}"
        self._reached = reached

    @classmethod
    def create(cls, destination: Path, plan_digest: str, *, reached: Step = lambda _: None) -> "Stage":
        """Make the staging folder, or take up the one a killed run of the same plan left. The caller holds `lock_of(destination)`.

        Args:
            destination: must not exist.
            plan_digest: identifies what will be written.
            reached: see the class.

        Returns:
            The stage.

        Raises:
            CommitError: the destination exists.
        """
        refuse_taken(destination)
        stage = cls(destination, plan_digest, reached)
        (stage.folder / _PROGRESS).mkdir(parents=True, exist_ok=True)
        stage._clear()
        reached("staged")
        return stage

    def finished(self, file: FilePlan) -> FileRecord | None:
        """Return the record of a file that an earlier run finished, if its bytes still have the digest recorded.

        Args:
            file: one of the plan's files.

        Returns:
            The record, or None when the file must be written.
        """
        try:
            record = self.record_of(file.name)
        except (FileNotFoundError, ValidationError):  # a power failure may tear a record
            return None
        staged = self.folder / file.name
        if not staged.is_file() or staged.stat().st_size != file.nbytes or sha256_of(staged) != record.sha256:
            return None
        return record

    def record_of(self, name: str) -> FileRecord:
        """Return the record of a finished file.

        Args:
            name: the file.

        Returns:
            What `keep` stored.

        Raises:
            FileNotFoundError: the file is not finished.
            ValidationError: the record is torn.
        """
        return _RECORDS.validate_json(self._record_path(name).read_bytes())

    def keep(self, record: FileRecord) -> None:
        """Record that a file is finished.

        Args:
            record: of a file whose bytes lie in the stage.
        """
        path = self._record_path(record.name)
        draft = path.with_suffix(".tmp")
        draft.write_bytes(_RECORDS.dump_json(record))
        draft.replace(path)
        self._reached(f"wrote {record.name}")

    def commit(self, *, durable: bool = True) -> None:
        """Publish: marker, fsync, rename.

        Args:
            durable: whether to wait until the disk has everything; only benchmarks do without.

        Raises:
            CommitError: the destination appeared meanwhile.
            OSError: the disk is full or failing.
        """
        shutil.rmtree(self.folder / _PROGRESS, ignore_errors=True)
        self._reached("checked")
        if durable:
            sync_tree(self.folder)
        self._reached("synced")
        manifest = sha256_of(self.folder / MANIFEST_NAME)
        marker = self.folder / MARKER_NAME
        marker.write_text(json.dumps({"manifest_sha256": manifest}) + "\n")
        if durable:
            _sync(marker)
            _sync(self.folder)
        self._reached("marked")
        rename_noreplace(self.folder, self.destination)
        self._reached("renamed")
        if durable:
            _sync(self.destination.parent)

    def discard(self) -> None:
        """Remove the stage and everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _clear(self) -> None:
        # Only finished files are taken up: what else a killed run left (a tokenizer since replaced, half a file) must not be published.
        finished = {path.name.removesuffix(".json") for path in (self.folder / _PROGRESS).glob("*.json")}
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                if path.name != _PROGRESS:
                    shutil.rmtree(path)
            elif path.name not in finished:
                path.unlink()

    def _record_path(self, name: str) -> Path:
        return self.folder / _PROGRESS / f"{name}.json"


def lock_of(destination: Path, *, wait: bool = False) -> ProcessLock:
    """Return the lock that an export to `destination` must hold.

    Args:
        destination: where the release will be.
        wait: whether to wait for another export that holds it instead of raising.

    Returns:
        A context manager.
    """
    refusal = CommitError(
        "another export to this destination is running", where=str(destination), remedy="Wait for it, or choose another --to."
    )
    return ProcessLock(destination.parent / f".{destination.name}.shardwright.lock", refusal, wait=wait)


def stale_stages(destination: Path) -> list[Path]:
    """Return the staging folders that earlier runs left for a destination.

    Args:
        destination: where the release would be.

    Returns:
        Folders, sorted.
    """
    parent = destination.parent
    return sorted(p for p in parent.glob(f".{_escape(destination.name)}.shardwright-*") if p.is_dir()) if parent.is_dir() else []


def staged_destinations(folder: Path) -> list[Path]:
    """Return the destinations in a folder for which earlier runs left staging folders.

    Args:
        folder: where releases are published.

    Returns:
        Paths of releases that would be there, sorted.
    """
    stages = (path.name for path in folder.glob(".*.shardwright-*") if path.is_dir())
    return sorted({folder / name.removeprefix(".").rpartition(".shardwright-")[0] for name in stages})


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def sync_tree(folder: Path) -> None:
    """Wait until the disk has everything in a folder.

    Args:
        folder: with all it holds.
    """
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename a folder in one step, never onto something that exists.

    Args:
        source: the folder.
        target: its new name, on the same file system.

    Raises:
        CommitError: the target exists.
        OSError: the system refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):  # a file system without the flag: the lock is held, so only an outsider could race
        refuse_taken(target)
        source.rename(target)
        return
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        refuse_taken(target)
    raise OSError(code, os.strerror(code), str(target))
