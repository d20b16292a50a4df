"""sha256 of many files at once."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from validators.release import sha256_of


def digest_all(folder: Path, names: Iterable[str], workers: int) -> dict[str, str]:
    """Hash files.

    Args:
        folder: what the names count from.
        names: plain files.
        workers: files read at a time.

    Returns:
        sha256 in hex, by name.
    """
    wanted = list(names)
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(wanted, pool.map(lambda name: sha256_of(folder / name), wanted), strict=True))
