"""What a release must be, judged with hashlib, json and the safetensors library alone."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

MARKER, MANIFEST = "shardwright.committed", "shardwright.json"
RUN_FIELDS = ("run_id", "made", "versions")


def is_whole(release: Path) -> bool:
    """Whether the marker fits the manifest, and the manifest every file, none more and none less."""
    manifest = (release / MANIFEST).read_bytes()
    if json.loads((release / MARKER).read_text())["manifest_sha256"] != hashlib.sha256(manifest).hexdigest():
        return False
    listed = {name: entry["sha256"] for name, entry in json.loads(manifest)["files"].items()}
    found = {p.relative_to(release).as_posix(): _sha256(p) for p in release.rglob("*") if p.is_file() and p.name not in (MARKER, MANIFEST)}
    return listed == found


def content_of(release: Path) -> dict[str, object]:
    """Every file's sha256, and the manifest without what names the run; equal for two exports of the same."""
    manifest = json.loads((release / MANIFEST).read_text())
    kept = {key: value for key, value in manifest.items() if key not in (*RUN_FIELDS, "files")}
    return {p.name: _sha256(p) for p in release.iterdir() if p.name not in (MARKER, MANIFEST, "README.md")} | {"manifest": kept}


def tree_of(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Every file's sha256, mtime in ns and mode, and every folder's mode: what a read-only source must keep."""
    return {
        str(p.relative_to(folder)): (_sha256(p) if p.is_file() else "", p.stat().st_mtime_ns, p.stat().st_mode)
        for p in sorted(folder.rglob("*"))
    } | {".": ("", folder.stat().st_mtime_ns, folder.stat().st_mode)}


def tensors_of(release: Path) -> dict[str, torch.Tensor]:
    """All tensors of a release, by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(release.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
