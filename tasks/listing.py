"""The files of a folder as they are listed: sizes and times, links that leave it, mounts in it. Nothing is read."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISLNK

from reports.paths import passed_paths, real_path
from validators.drills.record import RECORD_NAME

THINNED_NAME = "shardwright.thinned.json"  # in a save whose training state was deleted, or is being
TRAINER_STATE = "trainer_state.json"
# What this product writes into a save, half-written too
_OURS = re.compile(rf"^\.?(?:{re.escape(RECORD_NAME)}|{re.escape(THINNED_NAME)})")
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one folder, at every depth: name relative to it → what lstat says."""

    folder: Path
    stats: Mapping[str, os.stat_result]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(stat.st_size for stat in self.stats.values())

    @property
    def saved_at(self) -> float:
        """When the trainer wrote its newest file, in seconds since 1970; 0 without one."""
        return max((stat.st_mtime for name, stat in self.stats.items() if not _OURS.match(name)), default=0.0)

    def unfinished_marks(self) -> tuple[str, ...]:
        """Return what killed runs left of marks that they were writing.

        Returns:
            Names.
        """
        return tuple(name for name in self.stats if name.startswith(f".{THINNED_NAME}"))

    def content(self, name: str) -> bytes:
        """Return a file's bytes.

        Args:
            name: one of the names.

        Returns:
            All of them.
        """
        with open(self.path(name), "rb") as file:
            return file.read()

    def path(self, name: str) -> str:
        """Return where a file is.

        Args:
            name: one of the names.

        Returns:
            Its path.
        """
        return f"{self.folder}/{name}"

    def digest(self) -> str:
        """Return what changes when a file is added, removed, or written to: sha256 of names, sizes and times of what the trainer wrote.

        Returns:
            Hex digits.
        """
        rows = (f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for name, stat in sorted(self.stats.items()) if not _OURS.match(name))
        return hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()

    def leaving(self) -> tuple[str, ...]:
        """Return where the links in it lead that leave it, each place on the way among them.

        Returns:
            Absolute paths, sorted.
        """
        links = [name for name, stat in self.stats.items() if S_ISLNK(stat.st_mode)]
        if not links:
            return ()
        here = real_path(self.folder)
        places = {place for name in links for place in passed_paths(self.folder / name)}
        return tuple(sorted(str(place) for place in places if not place.is_relative_to(here)))

    def linked(self) -> tuple[tuple[int, int, int], ...]:
        """Return its files that have other names too: deleting one of the names gives nothing back.

        Returns:
            (inode, names it has, bytes), once per name in this folder.
        """
        return tuple((stat.st_ino, stat.st_nlink, stat.st_size) for stat in self.stats.values() if stat.st_nlink > 1)


def list_files(folder: Path) -> Listing:
    """Return a folder's files; links are not followed.

    Args:
        folder: an existing one.

    Returns:
        Its files.

    Raises:
        OSError: a folder in it cannot be listed, or a file is gone meanwhile.
    """
    return Listing(folder, dict(_walk(str(folder), "")))


def _walk(folder: str, inner: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{inner}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{name}/")
            else:
                yield name, entry.stat(follow_symlinks=False)


def mounts_in(root: Path) -> tuple[Path, ...]:
    """Return what is mounted below a folder, as Linux tells it (proc(5), mountinfo: the fifth field, octal escapes).

    Args:
        root: resolved.

    Returns:
        Mount points; none where the system does not tell.
    """
    if not _MOUNTS.is_file():
        return ()
    fields = [line.split(b" ")[4].decode("utf-8", "surrogateescape") for line in _MOUNTS.read_bytes().splitlines()]
    points = (Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)) for text in fields)
    return tuple(point for point in points if point != root and point.is_relative_to(root))
