"""The formats this product reads, and how a path becomes a reader."""

from tasks.engine.formats.reader import CheckpointReader

READERS: tuple[type[CheckpointReader], ...] = ()
