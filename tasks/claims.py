"""Who names a save: reports in the runs' folder, runs that are reading it now, and what the trainer keeps beside its saves: pointer files,
links, and Trainer's best model. And which saves a drill has verified.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePath

from reports.model import path_of
from reports.paths import real_path
from tasks.drill_history import read_history
from tasks.saves import read_pointers
from validators.retention.evidence import Claim, SeenSave

READING_NAME = "reading.json"  # in the folder of a run that is reading checkpoints; locked while it does
_TRAINER_STATE = "trainer_state.json"
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
    names = frozenset(save.name for save in saves)
    found = []
    for folder in sorted(runs.iterdir() if runs.is_dir() else ()):
        if folder.is_dir():
            found += [Claim(name, f"named by the report of {folder.name}") for name in _reported(folder, root, names)]
            found += [Claim(name, f"{folder.name} is reading it") for name in sorted(_being_read(folder, root, names))]
    return tuple(found)


def find_pointed(root: Path, saves: Sequence[SeenSave]) -> tuple[Claim, ...]:
    """Return the saves that something in the run's own root names.

    Args:
        root: the training run's root, resolved.
        saves: its saves.

    Returns:
        Claims: of pointer files, of links (`best -> step-200`), of the best model that Trainer remembers.
    """
    return (*_by_pointer(root, saves), *_by_link(root, saves), *_by_trainer(root, saves))


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
    return tuple(folder.name for folder in folders if _being_read(folder, root, frozenset({name})))


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


def save_of(path: Path, root: Path) -> str:
    """Return which folder of a run's root a path is, or lies in. The path is resolved once, however many saves there are.

    Args:
        path: as a report or a link says it.
        root: the training run's root, resolved.

    Returns:
        The folder's name; "" for the root itself, a relative path and one elsewhere.
    """
    real = real_path(path)
    return real.relative_to(root).parts[0] if path.is_absolute() and real != root and real.is_relative_to(root) else ""


def _by_pointer(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    # `latest` says a folder's name, Megatron's tracker a step.
    for pointer, named in read_pointers(root).items():
        yield from (Claim(save.name, f"the pointer file {pointer} names it") for save in saves if named in (save.name, str(save.step)))


def _by_link(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    names = {save.name for save in saves}
    for link in sorted(entry.name for entry in os.scandir(root) if entry.is_symlink()):
        name = save_of(root / link, root)
        if name in names:
            yield Claim(name, f"the link {link} leads to it")


def _by_trainer(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    # The newest state says which is the best by now (transformers 5.24, TrainerState.best_model_checkpoint): Trainer loads it at the end.
    newest = next((path for path in (root / save.name / _TRAINER_STATE for save in reversed(saves)) if path.is_file()), None)
    for state in (*([newest] if newest else []), root / _TRAINER_STATE):
        best = _best_model(state)
        yield from (Claim(save.name, f"the best model by {state.relative_to(root)}") for save in saves if save.name == best)


def _best_model(state: Path) -> str:
    try:
        return PurePath(json.loads(state.read_bytes())["best_model_checkpoint"]).name
    except (OSError, ValueError, KeyError, TypeError):  # none, half-written, or it knows no best one
        return ""


def _reported(folder: Path, root: Path, names: frozenset[str]) -> list[str]:
    try:
        report = json.loads((folder / "report.json").read_bytes())
        kind, said = report["kind"], (report["source"], report["subject"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no report, or one of another version
    return [] if kind == OWN_KIND else sorted({save_of(Path(path_of(str(text))), root) for text in said} & names)


def _being_read(folder: Path, root: Path, names: frozenset[str]) -> frozenset[str]:
    path = folder / READING_NAME
    if not path.is_file() or not _is_locked(path):
        return frozenset()
    paths = [Path(text) for text in json.loads(path.read_bytes())]
    if any(real_path(path) == root for path in paths):
        return names  # a run's root is read while one of its saves is chosen
    return names & {save_of(path, root) for path in paths}


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
