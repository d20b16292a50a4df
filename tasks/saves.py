"""The saves of one training run: which are complete, which are not and why, what is left of interrupted ones. Metadata only."""

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from reports.errors import FormatError, HostilePickleError
from reports.paths import real_path
from tasks.engine.formats.dcp import MODEL_ONLY
from tasks.engine.formats.folders import list_steps, step_of
from tasks.engine.formats.reader import CheckpointReader
from tasks.engine.formats.readers import READERS, open_checkpoint
from tasks.listing import Listing, list_files
from tasks.thinning import is_thinned
from validators.drills.commit import THINNED
from validators.drills.evidence import PastDrill, Save
from validators.drills.record import RECORD_NAME

# What a refusal says → what is wrong with the save, one word for machines
CAUSES: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"files are missing|ranks? [\d, ]+ lost"): "ranks-missing",
        re.compile(r"cut short|is cut short"): "cut-short",
        re.compile(r"\.metadata is missing|index is missing"): "uncommitted",
        re.compile(r"interrupted"): "overwritten",
        re.compile(r"holds no model"): "no-model",
        re.compile(r"^weights only"): THINNED,
    }
)
POINTERS = ("latest", "latest_checkpointed_iteration.txt", "checkpoint_last", "last_checkpoint", "latest.txt")
_TEMPORARY = re.compile(r"\.(?:tmp|temp|partial|incomplete)$|^tmp")


@dataclass(frozen=True, slots=True)
class Saves:
    """All saves under a root, by step, the newest last; `pointer` is what a pointer file beside them names, "" without one.

    `find_seconds` is how long it took, from the newest down, until a complete one was found.
    """

    root: Path
    saves: tuple[Save, ...]
    pointer: str
    leftovers: tuple[str, ...]
    find_seconds: float = 0.0

    def complete(self) -> list[Save]:
        """Return the saves that can be read.

        Returns:
            Saves, the oldest first.
        """
        return [save for save in self.saves if save.is_complete]

    def interval_seconds(self) -> float:
        """Return the time between complete saves, as their files tell.

        Returns:
            The median; 0 with fewer than two.
        """
        times = sorted(save.saved_at for save in self.complete())
        gaps = sorted(late - early for early, late in itertools.pairwise(times))
        return gaps[len(gaps) // 2] if gaps else 0.0


def list_saves(root: Path, also: Sequence[Path] = (), clock: Callable[[], float] = lambda: 0.0) -> Saves:
    """Return the saves under a run's root, or the one save that `root` is.

    Args:
        root: an existing folder.
        also: more roots of the same saves, for node-local disks.
        clock: counts seconds.

    Returns:
        Saves in numeric order of their steps.

    Raises:
        FormatError: the root cannot be listed.
    """
    steps = list_steps(root)
    if not steps or (len(steps) == 1 and any(kind.probe(root).matches for kind in READERS)):  # ZeRO keeps global_stepN inside a save
        begun = clock()
        alone = look_at(root, step_of(root.absolute()), tuple(also))
        return Saves(root, (alone,), "", (), clock() - begun)
    for name in dangling_steps(root):
        steps.setdefault(step_of(Path(name)) or 0, []).append(name)
    begun, found_at, found = clock(), 0.0, []
    for step in sorted(steps, reverse=True):
        for name in sorted(steps[step]):
            found.append(look_at(root / name, step, of_step(also, name)))
            found_at = found_at or (clock() - begun if found[-1].is_complete else 0.0)
    leftovers = tuple(sorted(path.name for path in root.iterdir() if _TEMPORARY.search(path.name)))
    return Saves(root, tuple(reversed(found)), pointed_at(root), leftovers, found_at)


def dangling_steps(root: Path) -> list[str]:
    """Return the links under a run's root that are named like a save and lead nowhere: its disk is not mounted, or was emptied.

    Args:
        root: an existing folder.

    Returns:
        Names, sorted.
    """
    return sorted(path.name for path in root.iterdir() if path.is_symlink() and not path.exists() and step_of(Path(path.name)) is not None)


def of_step(also: Sequence[Path], name: str) -> tuple[Path, ...]:
    """Return where other roots have a save.

    Args:
        also: roots of the run, or of the save itself.
        name: the save's folder.

    Returns:
        A folder per root.
    """
    return tuple(other / name if (other / name).is_dir() else other for other in also)


def choose_older(complete: Sequence[Save], newest: Save, history: Sequence[PastDrill]) -> Save | None:
    """Return the save to drill beside the newest: the older one that was drilled least recently.

    Args:
        complete: saves that can be read, the oldest first.
        newest: the one chosen already.
        history: earlier drills, the oldest first.

    Returns:
        A save; None when there is no older one.
    """
    last = {name: number for number, past in enumerate(history) for name in past.drilled}
    older = complete[: complete.index(newest)]
    return min(older, key=lambda save: (last.get(save.name, -1), -(save.step or 0)), default=None)


def open_save(save: Save) -> CheckpointReader:
    """Return the reader of a save.

    Args:
        save: a complete one.

    Returns:
        Its reader.

    Raises:
        FormatError: it has changed since it was listed.
    """
    return open_checkpoint(Path(save.path), also=[Path(root) for root in save.also])


def look_at(folder: Path, step: int | None, also: tuple[Path, ...] = ()) -> Save:
    """Return one save: whether it can be read, and what it takes.

    Args:
        folder: the save.
        step: what its name tells, if it does.
        also: its folders on other disks.

    Returns:
        The save.
    """
    cause = refusal = kind = ""
    listing = _list(folder)
    try:
        _refuse_thinned(listing)
        catalog = open_checkpoint(folder, also=also).catalog()
        kind = catalog.format
        step = catalog.step if step is None else step
        unread = [note for note in catalog.notes if MODEL_ONLY in note]
        if unread:  # an export can do without the optimizer, a resume cannot
            cause, refusal = _cause_of(unread[0]), unread[0]
    except HostilePickleError as error:
        cause, refusal = "hostile", str(error)
    except FormatError as error:
        cause, refusal = _cause_of(error.what), str(error)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD_NAME]
    stats = {path: path.stat() for path in files}
    empty = [str(path.relative_to(folder)) for path, stat in stats.items() if stat.st_size == 0]
    temporary = [str(path.relative_to(folder)) for path in files if _TEMPORARY.search(path.name)]
    return Save(
        folder.name,
        str(folder),
        step,
        cause,
        refusal,
        max((stat.st_mtime for stat in stats.values()), default=0.0),
        sum(stat.st_size for stat in stats.values()),
        tuple(sorted({*empty, *temporary})),
        kind,
        tuple(str(root.absolute()) for root in also),
        listing.digest(),
    )


def _list(folder: Path) -> Listing:
    # Nothing where it cannot be listed: opening it says why, and no listing is that of a verified save.
    try:
        return list_files(folder)
    except OSError:
        return Listing(folder, {})


def _refuse_thinned(listing: Listing) -> None:
    if is_thinned(listing):
        raise FormatError("weights only: retention deleted its training state", where=str(listing.folder))


def _cause_of(words: str) -> str:
    return next((word for pattern, word in CAUSES.items() if pattern.search(words)), "damaged")


def pointed_at(root: Path) -> str:
    """Return what the pointer file of a run's root names; of several, the first of POINTERS.

    Args:
        root: an existing folder.

    Returns:
        A folder's name or a step, as written; "" without a pointer.
    """
    return next(iter(read_pointers(root).values()), "")


def read_pointers(root: Path) -> dict[str, str]:
    """Return what each pointer file of a run's root names.

    Args:
        root: an existing folder.

    Returns:
        The pointer's name → a folder's name or a step, as written; in the order of POINTERS.
    """
    return {name: _read_pointer(root / name) for name in POINTERS if os.path.lexists(root / name)}


def _read_pointer(path: Path) -> str:
    if path.is_symlink() and not path.is_file():
        return real_path(path).name
    is_text = path.is_file() and path.stat().st_size < 1000
    return path.read_text(encoding="utf-8", errors="replace").strip() if is_text else ""
