"""What export and gate refuse alike before any work."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from reports.errors import RequestError
from validators.check import Check


def refuse_golden(golden: Path | None) -> None:
    """Raise when recorded logits were named that are no file.

    Args:
        golden: what --golden says, or None.

    Raises:
        RequestError: it does not exist, or is a folder.
    """
    if golden is not None and not golden.is_file():
        what = "is a folder, not a file" if golden.exists() else "does not exist"
        raise RequestError(what, where=f"--golden {golden}", remedy="Give the safetensors file that the trainer recorded.")


def refuse_unknown_checks(skipped: Iterable[str], checks: Sequence[Check]) -> None:
    """Raise when a check is left out that there is not.

    Args:
        skipped: names that --skip gives.
        checks: those that will run.

    Raises:
        RequestError: one of the names is none of theirs.
    """
    names = [check.name for check in checks]
    unknown = sorted(set(skipped) - set(names))
    if unknown:
        raise RequestError(f"no check {unknown[0]!r}", where="--skip", remedy=f"There are {', '.join(names)}.")
