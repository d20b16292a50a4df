"""What the two formats of DeepSpeed have in common: saves under tags, and a table of homes."""

from pathlib import Path
from typing import ClassVar

from tasks.engine.formats.reader import CheckpointReader, Payload, Source
from tasks.engine.formats.zero_names import find_root, is_save
from tasks.engine.formats.zero_table import HomeTable
from tasks.engine.tensors.catalog import Fragment


class DeepSpeedReader(CheckpointReader):
    """Reads one save of DeepSpeed.

    Args:
        source: a save's folder, or a root with its tag; and the other nodes' roots.
    """

    has_tags: ClassVar[bool] = True
    universal: ClassVar[bool]

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._table = HomeTable()

    @classmethod
    def holds_tag(cls, path: Path, tag: str) -> bool:
        """Say whether `tag` is one of this format's saves in `path`.

        Args:
            path: a folder.
            tag: name of a save.

        Returns:
            Whether it is.
        """
        if is_save(path, universal=cls.universal):
            return path.absolute().name == tag
        folder = path / (find_root(path, universal=cls.universal) or "") / tag
        return folder.is_dir() and is_save(folder, universal=cls.universal)

    def _locate(self, fragment: Fragment) -> Payload:
        return self._table.payload(fragment)
