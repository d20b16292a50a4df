"""Where a path really leads."""

import os
from pathlib import Path


def real_path(path: Path) -> Path:
    """Return an absolute path with every link followed; a link that leads to itself stays as it is.

    `Path.resolve` raises RuntimeError for such a one before Python 3.13.

    Args:
        path: of anything, existing or not.

    Returns:
        The path.
    """
    return Path(os.path.realpath(path))
