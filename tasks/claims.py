"""Who names a save in the runs' folder: reports, ledgers, and runs that are reading it now. And which saves a drill has verified.

What cannot be understood claims every save: a report that is not read might name any of them.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reports.errors import FormatError
from reports.model import path_of
from reports.paths import real_path
from tasks.drill_history import read_history
from validators.retention.evidence import Claim, SeenSave

READING_NAME = "reading.json"  # in the folder of a run that is reading checkpoints; locked while it does
REPORT_NAME = "report.json"
LEDGER_NAME = "ledger.json"
OWN_KIND = "retain"  # reports of retention itself name every save
LEDGER_KIND = "ledger"


def find_claims(
    runs: Path, root: Path, saves: Sequence[SeenSave], settled: frozenset[str] = frozenset(), let_go: frozenset[str] = frozenset()
) -> tuple[Claim, ...]:
    """Return who names which save.

    Args:
        runs: where run folders are.
        root: the training run's root, resolved.
        saves: its saves.
        settled: run folders that were looked at already.
        let_go: kinds of reports that hold nothing.

    Returns:
        Claims, by run folder.

    Raises:
        FormatError: the runs' folder cannot be listed.
    """
    names = frozenset(save.name for save in saves)
    found: list[Claim] = []
    for folder in _run_folders(runs):
        if folder.name not in settled:
            found += [Claim(name, because) for because, named in _claims_of(folder, root, names, let_go) for name in sorted(named)]
    return tuple(found)


def find_settled(runs: Path) -> frozenset[str]:
    """Return the run folders that have their report: what they claim will not change.

    Args:
        runs: where run folders are.

    Returns:
        Names.

    Raises:
        FormatError: the runs' folder cannot be listed.
    """
    return frozenset(
        folder.name for folder in _run_folders(runs) if (folder / REPORT_NAME).is_file() and not (folder / READING_NAME).exists()
    )


def find_verified(runs: Path, root: Path, saves: Sequence[SeenSave]) -> frozenset[str]:
    """Return the saves that the latest drill that read them found sound, in a green drill, and whose files are those it read.

    Args:
        runs: where the history of drills is.
        root: the training run's root.
        saves: its saves.

    Returns:
        Names.

    Raises:
        FormatError: the history is damaged.
    """
    sound: dict[str, str] = {}
    for past in read_history(runs, root):
        sound |= {name: past.listings.get(name, "") if past.green else "" for name in past.drilled}
        sound |= dict.fromkeys(past.damaged, "")
    return frozenset(save.name for save in saves if save.listing and sound.get(save.name) == save.listing)


def save_of(path: Path, root: Path) -> str:
    """Return which folder of a run's root a path is, or lies in. The path is resolved once, however many saves there are.

    Args:
        path: as a report or a link says it.
        root: the training run's root, resolved.

    Returns:
        The folder's name; "" for the root itself, a relative path and one elsewhere.
    """
    return folder_of(real_path(path), root) if path.is_absolute() else ""


def folder_of(real: Path, root: Path) -> str:
    """Return which folder of a run's root a resolved path is, or lies in.

    Args:
        real: the path.
        root: the training run's root, resolved.

    Returns:
        The folder's name; "" for the root itself and a path elsewhere.
    """
    return real.relative_to(root).parts[0] if real != root and real.is_relative_to(root) else ""


def _run_folders(runs: Path) -> list[Path]:
    try:
        return sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    except OSError as error:
        raise FormatError(f"cannot be listed: {error.strerror}", where=str(runs), remedy="Its reports say which saves must stay.") from None


def _claims_of(folder: Path, root: Path, names: frozenset[str], let_go: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    try:
        read = _being_read(folder / READING_NAME, root, names)
        yield f"{folder.name} is reading it", read
        report = _load(folder / REPORT_NAME)
        yield f"named by the report of {folder.name}", _reported(report, root, names, let_go)
        if report and report["kind"] == LEDGER_KIND and _may_be(Path(str(report["subject"])), root):
            yield f"the ledger of {folder.name} has an evaluation of it", _evaluated(folder / LEDGER_NAME, names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield f"{folder.name} cannot be read, and may name it ({type(error).__name__}: {error})", names


def _may_be(path: Path, root: Path) -> bool:
    return not os.path.lexists(path) or _is_same(path, root)  # a root that was moved since is not there


def _load(path: Path) -> Mapping[str, object] | None:
    if not os.path.lexists(path):
        return None  # a run that is going on, or was killed
    held = json.loads(path.read_bytes())
    if not isinstance(held, dict):
        raise ValueError("no report")  # noqa: TRY004  # what the bytes say is at fault, not the caller
    return held


def _reported(report: Mapping[str, object] | None, root: Path, names: frozenset[str], let_go: frozenset[str]) -> frozenset[str]:
    if report is None or report["kind"] in {OWN_KIND, LEDGER_KIND} | let_go:
        return frozenset()
    said = [report[name] for name in ("checkpoint", "source", "subject") if name in report]
    if not said or not all(isinstance(text, str) for text in said):
        raise ValueError("it says of no checkpoint")
    return frozenset(_named(text, root, names) for told in map(str, said) for text in (told, path_of(told))) - {""}


def _named(text: str, root: Path, names: frozenset[str]) -> str:
    path = Path(text)
    name = save_of(path, root)
    if name in names or not path.is_absolute():
        return name if name in names else ""
    # The same folder by another way: mounted elsewhere too, or a path of another machine, which does not exist here.
    for depth, part in reversed(list(enumerate(path.parts, 1))):
        there = Path(*path.parts[:depth])
        if part in names and (not os.path.lexists(there) or _is_same(there, root / part)):
            return part
    return ""


def _evaluated(path: Path, names: frozenset[str]) -> frozenset[str]:
    rows = json.loads(path.read_bytes())
    return names & {save["name"] for row in rows if row["evaluations"] for save in row["saves"]}


def _being_read(path: Path, root: Path, names: frozenset[str]) -> frozenset[str]:
    try:
        if not _is_locked(path):
            return frozenset()
        paths = json.loads(path.read_bytes())
    except FileNotFoundError:  # none is, or the run has just ended
        return frozenset()
    if any(real_path(Path(text)) == root or _is_same(Path(text), root) for text in paths):
        return names  # a run's root is read while one of its saves is chosen
    return frozenset(_named(text, root, names) for text in paths) - {""}


def _is_same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second on file systems whose locks are mandatory
            return True
    return False
