"""`integrity.json` of a torch_dist save: sha256 of each of its files, written with --verify-integrity (core 0.17 and up).

Every listed file must be there. Those that say where everything lies are hashed before they are believed, the data files when a
release has been made of them. Digests of another algorithm are not held.

Source: Megatron-LM core 0.17 to main, megatron/core/dist_checkpointing (integrity of saves).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from reports.errors import FormatError, name_some
from tasks.engine.containers.ranges import read_whole
from tasks.engine.formats.folders import find_file
from tasks.engine.formats.megatron_args import REMEDY
from tasks.engine.formats.reader import Source

INTEGRITY = "integrity.json"


def check_integrity(source: Source, inner: str, hashed: Collection[str]) -> dict[str, str]:
    """Hold a save against its own list of files, where it has one.

    Args:
        source: the roots.
        inner: the save's folder inside the main root.
        hashed: names of files to hash, where they are listed.

    Returns:
        The others: absolute path → sha256. Empty where there is no list.

    Raises:
        FormatError: the list makes no sense, names a file that is missing, or a file is not what was written.
    """
    listed = find_file(source, inner, INTEGRITY)
    if listed is None:
        return {}
    digests = _read(read_whole(listed.absolute), listed.absolute)
    found = {name: find_file(source, inner, name) for name in digests}
    lost = [name for name, file in found.items() if file is None]
    if lost:
        raise FormatError(f"lists {name_some(lost)}, which this save lacks", where=listed.absolute, remedy=REMEDY)
    others = {}
    for name, digest in sorted(digests.items()):
        file = found[name]
        assert file is not None
        if name not in hashed and digest:
            others[file.absolute] = digest.lower()
        elif digest and hashlib.sha256(read_whole(file.absolute)).hexdigest() != digest.lower():
            raise FormatError(
                f"is not the file that {INTEGRITY} lists: its sha256 is another",
                where=file.absolute,
                remedy="Restore the file from another copy, or export another step.",
            )
    return others


def _read(content: bytes, where: str) -> Mapping[str, str]:
    try:
        held = json.loads(content)
    except ValueError:
        held = None
    files = held.get("files") if isinstance(held, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) and Path(name).name == name for name, digest in files.items()):
        raise FormatError("is no list of digests by file name", where=where, remedy="Restore the file, or remove it to read without it.")
    is_sha256 = held.get("algorithm", "sha256") == "sha256"
    return files if is_sha256 else dict.fromkeys(files, "")
