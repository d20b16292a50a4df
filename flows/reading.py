"""While a run reads checkpoints it says so: retention deletes none of them."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reports.write import replace_text
from tasks.claims import READING_NAME


@contextmanager
def reading(folder: Path, sources: Sequence[Path]) -> Iterator[None]:
    """Hold a lock on a file that names what is read, while the block runs. A killed run's lock goes with it.

    Open the checkpoint inside the block: retention renames a save before it looks for locks, so one that is found under the lock stays.

    Args:
        folder: the run folder.
        sources: checkpoints, or runs' roots of which one is chosen.

    Yields:
        Nothing.
    """
    path = replace_text(folder / READING_NAME, json.dumps([str(source.absolute()) for source in sources]))
    with path.open("r+b") as file:  # NFS locks no file for one that may not write to it (flock(2))
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink()
