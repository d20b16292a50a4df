"""A tiny sharded checkpoint and the requests that export it: what the reliability tests share."""

from pathlib import Path

NO_FORWARD = ["logits=no model here"]


def request_for(source: Path, base: Path, **changed: object) -> dict[str, object]:
    """Export a toy under its own names to base/out, in files of 1000 bytes; no config, no logits."""
    return {
        "source": str(source),
        "to": str(base / "out"),
        "family": "none",
        "max_file": 1000,
        "skip": NO_FORWARD,
        "runs": str(base / "runs"),
        "fsync": False,
        **changed,
    }


def beside(base: Path) -> set[str]:
    """What lies beside the destination, the run folders and logs left out."""
    return {path.name for path in base.iterdir()} - {"runs", "log"}
