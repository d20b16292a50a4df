"""What happens, in what order, when it stops.

The rooms have generic names (`tasks`, `validators`, `reports`), and PyPI has packages of the same names. Importing this one refuses to go
on when another one won.
"""

from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def _refuse_strangers() -> None:
    for room in ("tasks", "validators", "reports"):
        spec = find_spec(room)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != _HOME:
            raise ImportError(
                f"package {room!r} comes from {origin or 'nowhere'}, not from {_HOME}. Install Shardwright in an environment of its own"
                f" (venv, pipx), without the PyPI package {room!r}, and run it outside folders that hold a {room}/ of their own."
            )


_refuse_strangers()
