"""A save as one folder of links, its files from all of its roots, for what reads a single folder. Touches nothing of the run."""

from collections.abc import Sequence
from pathlib import Path

from reports.paths import real_path
from validators.drills.evidence import Save


def link_save(save: Save, to: Path, inner: Sequence[str] = ("",)) -> Path:
    """Make a folder of links to a save's files; of files in several roots, the first root's.

    Args:
        save: a save, whose other roots may have its inner folders or be them.
        to: the folder to make.
        inner: folders inside the save that are wanted, "" for all of it.

    Returns:
        The folder.
    """
    for name in inner:
        others = [folder for root in map(Path, save.also) for folder in dict.fromkeys((root / name, root))]
        for folder in (Path(save.path) / name, *others):
            _link(folder, to / name, "**/*" if not name else "*")
    return to


def _link(folder: Path, to: Path, pattern: str) -> None:
    for path in sorted(folder.glob(pattern)):
        link = to / path.relative_to(folder)
        if path.is_file() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(real_path(path))
