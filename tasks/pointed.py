"""What lies in a training run's own root and names a save: pointer files, links, and Trainer's best model."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from reports.paths import passed_paths
from tasks.claims import folder_of
from tasks.engine.formats.folders import list_names
from tasks.listing import TRAINER_STATE
from tasks.saves import POINTERS, read_pointers
from validators.retention.evidence import Claim, SeenSave

_NOTE_NBYTES = 1000
_BETWEEN_NAMES = re.compile(r"[^\w.+=-]+")


def find_pointed(root: Path, saves: Sequence[SeenSave]) -> tuple[Claim, ...]:
    """Return the saves that something in the run's own root names.

    Args:
        root: the training run's root, resolved.
        saves: its saves.

    Returns:
        Claims: of pointer files and other short texts, of links (`best -> step-200`), of the best model that Trainer remembers.

    Raises:
        FormatError: the root cannot be listed.
    """
    return (*_by_pointer(root, saves), *_by_note(root, saves), *_by_link(root, saves), *_by_trainer(root, saves))


def find_linked(root: Path, saves: Sequence[SeenSave]) -> tuple[Claim, ...]:
    """Return the saves to which links inside of other folders lead: another save, or a folder beside the saves. All of them are walked.

    Args:
        root: the training run's root, resolved.
        saves: its saves.

    Returns:
        Claims.

    Raises:
        FormatError: the root cannot be listed.
    """
    found = [(save.name, Path(place)) for save in saves for place in save.leaving]
    names = {save.name for save in saves}
    for other in list_names(root):
        if other.endswith("/") and other[:-1] not in names:
            found += [(str(link.relative_to(root)), place) for link in _links_in(root / other[:-1]) for place in passed_paths(link)]
    return tuple(Claim(name, f"a link in {where} leads to it") for where, place in found for name in names & {folder_of(place, root)})


def _links_in(folder: Path) -> Iterator[Path]:
    for inner, folders, files in os.walk(folder):
        yield from (path for path in (Path(inner, name) for name in (*folders, *files)) if path.is_symlink())


def _by_pointer(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    # `latest` says a folder's name, or a path that holds it; Megatron's tracker a step.
    for pointer, named in read_pointers(root).items():
        said = set(_BETWEEN_NAMES.split(named))
        steps = {int(word) for word in said if word.isdecimal() and word.isascii()}
        yield from (Claim(save.name, f"the pointer file {pointer} names it") for save in saves if save.name in said or save.step in steps)


def _by_note(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    # Any short text beside the saves, such as `best.txt`. Of these only a save's whole name counts: a number may be anything.
    names = {save.name for save in saves}
    with os.scandir(root) as entries:
        notes = sorted(entry.name for entry in entries if entry.name not in POINTERS and entry.is_file(follow_symlinks=False))
    for note in notes:
        said = set(_BETWEEN_NAMES.split(_short_text(root / note)))
        yield from (Claim(name, f"the file {note} names it") for name in sorted(names & said))


def _short_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size < _NOTE_NBYTES else ""
    except OSError:  # it is gone, or somebody's own: it names nothing for this trainer
        return ""


def _by_link(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    names = {save.name for save in saves}
    for link in sorted(entry.name for entry in os.scandir(root) if entry.is_symlink()):
        for name in sorted(names & {folder_of(place, root) for place in passed_paths(root / link) if place != root / link}):
            yield Claim(name, f"the link {link} leads to it")


def _by_trainer(root: Path, saves: Sequence[SeenSave]) -> Iterator[Claim]:
    # The newest state says which is the best by now (transformers 5.24, TrainerState.best_model_checkpoint): Trainer loads it at the end.
    # One that is still being written says nothing yet; the one before it does.
    # After a run went back, the newest by step is of what it left, the newest by time of what it does.
    holding = [save for save in saves if save.holds_trainer_state]
    told: dict[Path, str | None] = {}
    for order in (holding, sorted(holding, key=lambda save: save.saved_at)):
        states = (root / save.name / TRAINER_STATE for save in reversed(order))
        told |= next(({path: best} for path in states if (best := _best_model(path)) is not None), {})
    beside = root / TRAINER_STATE
    for state, best in (told | {beside: _best_model(beside)}).items():
        yield from (Claim(save.name, f"the best model by {state.relative_to(root)}") for save in saves if save.name == best)


def _best_model(state: Path) -> str | None:
    # A name, "" when it knows no best one; None when it cannot be read.
    try:
        held = json.loads(state.read_bytes())
    except (OSError, ValueError):
        return None
    best = held.get("best_model_checkpoint") if isinstance(held, dict) else None
    return PurePath(best).name if isinstance(best, str) else ""
