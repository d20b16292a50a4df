"""What tasks of a drill hand to each other, as JSON files."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def write_stored(value: object, path: Path) -> Path:
    """Write a frozen value.

    Args:
        value: a dataclass of plain values.
        path: the file.

    Returns:
        `path`.
    """
    path.write_bytes(TypeAdapter(type(value)).dump_json(value))
    return path


def read_stored(kind: type[T], path: Path) -> T:
    """Read a frozen value.

    Args:
        kind: its class.
        path: what `write_stored` wrote.

    Returns:
        The value.
    """
    return TypeAdapter(kind).validate_json(path.read_bytes())
