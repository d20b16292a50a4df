"""Where a path really leads."""

import os
from pathlib import Path

_MOST_LINKS = 40  # as Linux counts before it gives up (path_resolution(7))


def real_path(path: Path) -> Path:
    """Return an absolute path with every link followed; a link that leads to itself stays as it is.

    `Path.resolve` raises RuntimeError for such a one before Python 3.13.

    Args:
        path: of anything, existing or not.

    Returns:
        The path.
    """
    return Path(os.path.realpath(path))


def passed_paths(path: Path) -> tuple[Path, ...]:
    """Return every place that a path passes through: each link on the way, by its real folder and its own name, and where it ends.

    Args:
        path: of anything, existing or not.

    Returns:
        Absolute paths, the end last; of a chain that leads to itself its first links.
    """
    passed: list[Path] = []
    here, todo = Path("/"), list(Path(os.path.abspath(path)).parts[1:])
    while todo and len(passed) < _MOST_LINKS:
        name = todo.pop(0)
        step = here.parent if name == ".." else here / name
        if step.is_symlink():
            passed.append(step)
            target = Path(os.readlink(step))
            here, todo = (Path("/") if target.is_absolute() else here), [*(part for part in target.parts if part != "/"), *todo]
        else:
            here = step
    return (*passed, here)
