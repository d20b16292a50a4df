"""The history of drills: one JSON line per drill in the runs' folder, appended whole or not at all."""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from reports.errors import FormatError
from reports.model import report_from_json
from reports.paths import real_path
from validators.drills.evidence import PastDrill

HISTORY_NAME = "drills.jsonl"
MAX_REPORTS = 200
_TAIL_NBYTES = 64_000_000  # longer than any line: a name per tensor
_PAST = TypeAdapter(PastDrill)


def append_history(runs: Path, root: Path, past: PastDrill) -> None:
    """Add one drill.

    Args:
        runs: where run folders go.
        root: the run's root that was drilled.
        past: what it found.
    """
    line = json.dumps(asdict(past) | {"root": str(real_path(root))}, sort_keys=True) + "\n"
    handle = os.open(runs / HISTORY_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _drop_torn_line(handle)
        os.write(handle, line.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_history(runs: Path, root: Path | None = None) -> tuple[PastDrill, ...]:
    """Return earlier drills.

    Args:
        runs: where run folders go.
        root: of which run; None for all.

    Returns:
        Drills, the oldest first.

    Raises:
        FormatError: a line is none, and is not the last one (which a killed drill may have left half-written).
    """
    return tuple(past for past in _lines(runs) if root is None or past.root == str(real_path(root)))


def history_state(runs: Path) -> tuple[int, int]:
    """Return what changes when a drill adds a line.

    Args:
        runs: where run folders go.

    Returns:
        Bytes and time (ns) of the history; zeros without one.
    """
    path = runs / HISTORY_NAME
    stat = path.stat() if path.is_file() else None
    return (stat.st_size, stat.st_mtime_ns) if stat else (0, 0)


def find_passed(runs: Path, checkpoint: Path) -> PastDrill | None:
    """Return the latest green drill that read a checkpoint.

    Args:
        runs: where run folders go.
        checkpoint: a save, or a folder in it.

    Returns:
        The drill; None when no green one read it. One of the same name in another run does not count.

    Raises:
        FormatError: a line of the history is none.
    """
    place, found = real_path(checkpoint), None
    for past in _lines(runs):
        if past.green and any(place.is_relative_to(_save_of(Path(past.root), name)) for name in past.drilled):
            found = past
    return found


def _save_of(root: Path, name: str) -> Path:
    # A drill's root is a run with a folder per save, or one save.
    return root if root.name == name and not (root / name).is_dir() else real_path(root / name)


def find_export(runs: Path, root: Path) -> str:
    """Return the latest run that exported a checkpoint of a training run, or held a release against one, and was green.

    Args:
        runs: where run folders go.
        root: the training run's root.

    Returns:
        Its run id; "" when none of the latest MAX_REPORTS is one.
    """
    folders = [path for kind in ("export", "gate") for path in runs.glob(f"{kind}-*/report.json")]
    latest = sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:MAX_REPORTS]
    return next((path.parent.name for path in latest if _is_green_export(path, root)), "")


def _is_green_export(path: Path, root: Path) -> bool:
    try:
        report = report_from_json(path.read_text(encoding="utf-8"))
    except ValueError:  # of another version; it proves nothing to this one
        return False
    return report.verdict().green and bool(report.checkpoint) and Path(report.checkpoint).is_relative_to(real_path(root))


def _drop_torn_line(handle: int) -> None:
    # What a drill that was killed, or a full disk, left of its line.
    nbytes = os.fstat(handle).st_size
    tail = os.pread(handle, _TAIL_NBYTES, max(0, nbytes - _TAIL_NBYTES))
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(handle, nbytes - len(tail) + tail.rfind(b"\n") + 1)


def _lines(runs: Path) -> Iterator[PastDrill]:
    path = runs / HISTORY_NAME
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield _PAST.validate_json(line)
        except ValidationError:
            if number == len(lines):
                return
            raise FormatError(f"line {number} is no drill", where=str(path), remedy="Remove the line, or move the file away.") from None
