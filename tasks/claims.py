"""Who names a save: reports in the runs' folder, and runs that are reading it now. And which saves a drill has verified."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from reports.model import path_of
from tasks.drill_history import read_history
from validators.retention.evidence import Claim, SeenSave

READING_NAME = "reading.json"  # in the folder of a run that is reading checkpoints; locked while it does
OWN_KIND = "retain"  # reports of retention itself name every save


def find_claims(runs: Path, root: Path, saves: Sequence[SeenSave]) -> tuple[Claim, ...]:
    """Return who names which save.

    Args:
        runs: where run folders are.
        root: the training run's root, resolved.
        saves: its saves.

    Returns:
        Claims, by run folder.
    """
    names = [save.name for save in saves]
    found = []
    for folder in sorted(runs.iterdir() if runs.is_dir() else ()):
        if folder.is_dir():
            found += [Claim(name, f"named by the report of {folder.name}") for name in _reported(folder, root, names)]
            found += [Claim(name, f"{folder.name} is reading it") for name in _being_read(folder, root, names)]
    return tuple(found)


def find_readers(runs: Path, root: Path, name: str) -> tuple[str, ...]:
    """Return the runs that are reading a save at this moment.

    Args:
        runs: where run folders are.
        root: the training run's root, resolved.
        name: the save.

    Returns:
        Run ids.
    """
    folders = sorted(path.parent for path in runs.glob(f"*/{READING_NAME}"))
    return tuple(folder.name for folder in folders if any(_being_read(folder, root, [name])))


def find_verified(runs: Path, root: Path, saves: Sequence[SeenSave]) -> frozenset[str]:
    """Return the saves that a green drill read whole, and that were not written to since.

    Args:
        runs: where the history of drills is.
        root: the training run's root.
        saves: its saves.

    Returns:
        Names.

    Raises:
        FormatError: the history is damaged.
    """
    drilled = [(name, datetime.fromisoformat(past.finished)) for past in read_history(runs, root) if past.green for name in past.drilled]
    last = dict(sorted(drilled, key=lambda pair: pair[1]))
    until = {name: finished.timestamp() + 1 for name, finished in last.items()}  # the history counts whole seconds
    return frozenset(save.name for save in saves if save.name in until and save.saved_at < until[save.name])


def _reported(folder: Path, root: Path, names: list[str]) -> Iterator[str]:
    try:
        report = json.loads((folder / "report.json").read_bytes())
        kind, said = report["kind"], (report["source"], report["subject"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # no report, or one of another version
    if kind != OWN_KIND:
        yield from (name for name in names if any(_is_in(path_of(str(text)), root / name) for text in said))


def _being_read(folder: Path, root: Path, names: list[str]) -> Iterator[str]:
    path = folder / READING_NAME
    if not path.is_file() or not _is_locked(path):
        return
    for text in json.loads(path.read_bytes()):
        # A run's root is read too while one of its saves is chosen.
        yield from (name for name in names if _is_in(text, root / name) or Path(text).resolve() == root)


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_in(text: str, save: Path) -> bool:
    return text.startswith("/") and Path(text).resolve().is_relative_to(save)
