"""What a format must be able to do. A format is one file with one class, and one row in `tasks.engine.formats.readers.READERS`.

Life of a reader: `probe` looks at file names and a few bytes and says why or why not; the constructor takes the folder; `catalog` reads
metadata only, and has checked that every file it names exists and is long enough; `payload` finds the raw values of one fragment.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tasks.engine.tensors.catalog import Catalog, Fragment


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a format recognises a folder, and because of what, as a clause: "no .metadata file"."""

    matches: bool
    because: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint is. `also` are more roots of the same save (node-local disks); `notes` say how it was chosen. `tag` is the
    save asked for where one folder holds several, "" for the one its writer calls the latest.
    """

    path: Path
    also: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    tag: str = ""

    @property
    def roots(self) -> tuple[Path, ...]:
        """All roots, the main one first."""
        return (self.path, *self.also)


@dataclass(frozen=True, slots=True)
class Checked:
    """`nbytes` bytes from `start` of a file, whose checksum the writer recorded."""

    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Payload:
    """The raw little-endian values of one fragment: `nbytes` bytes from `start` of the file `path` (absolute).

    `strides` (in elements) is None for C order, else how the fragment's dims step through the stored values. `crc32` is the checksum the
    writer recorded for these bytes, or None; where it recorded one for a longer run of bytes that they are part of, that is `part_of`.
    """

    path: str
    start: int
    nbytes: int
    strides: tuple[int, ...] | None
    crc32: int | None
    part_of: Checked | None = None


class CheckpointReader(ABC):
    """Reads one format. Instances are cheap, hold no open file, and may be used from several threads.

    A new format is a subclass with a name, a probe, a catalog and payloads, and a line in `readers.READERS`.

    Args:
        source: the folder, and more roots of the same save.
    """

    name: ClassVar[str]
    has_tags: ClassVar[bool] = False  # whether one folder may hold several saves, each under a tag

    def __init__(self, source: Source) -> None:
        self._source = source
        self._made: Catalog | None = None

    @classmethod
    @abstractmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` is this format, complete or not, reading no more than names and a few bytes.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """

    @classmethod
    def holds_tag(cls, path: Path, tag: str) -> bool:
        """Say whether `tag` names one of several saves that `path` holds in this format.

        Args:
            path: a folder.
            tag: name of a save.

        Returns:
            False, unless the format keeps saves under tags.
        """
        return False

    def catalog(self) -> Catalog:
        """Return what the checkpoint holds; no tensor byte is read.

        Returns:
            The catalog, the same on every call.

        Raises:
            HostilePickleError: a global outside the closed list.
            FormatError: incomplete, damaged, or of two saves; the message names the file.
        """
        if self._made is None:
            self._made = self._make_catalog()
        return self._made

    @abstractmethod
    def _make_catalog(self) -> Catalog: ...

    def payload(self, fragment: Fragment) -> Payload:
        """Find the raw values of a fragment.

        Args:
            fragment: one of this reader's catalog.

        Returns:
            Where the values are.

        Raises:
            FormatError: the record around the values is damaged, or disagrees with the catalog on dtype, shape or length.
        """
        self.catalog()
        return self._locate(fragment)

    @abstractmethod
    def _locate(self, fragment: Fragment) -> Payload: ...
