"""What lies in checkpoint folders: files found over several roots, checked before anything long starts, and a digest over them."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from reports.errors import FormatError, name_some
from tasks.engine.containers.ranges import unreadable
from tasks.engine.formats.reader import Source
from tasks.engine.tensors.catalog import Locator

# Names of a run's step folders; the first group is the step → who writes them so
STEP_FOLDERS: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"^step[-_]?(\d+)$"): "torchtitan (step-500), OLMo-core (step500)",
        re.compile(r"^checkpoint[-_](\d+)$"): "Hugging Face Trainer (checkpoint-500), accelerate (checkpoint_2)",
        re.compile(r"^global_step_?(\d+)$"): "DeepSpeed (global_step500), verl (global_step_500)",
        re.compile(r"^iter_(\d+)$"): "Megatron-LM (iter_0000500)",
        re.compile(
            r"^epoch[-_=]?\d+[-_]step[-_=]?(\d+)(?:\.ckpt)?$"
        ): "Lightning (epoch=0-step=500.ckpt), NeMo Automodel (epoch_0_step_500)",
        re.compile(r"^ep\d+-ba(\d+)$"): "Composer (ep0-ba500)",
        re.compile(r"^(?:epoch|ckpt|save)[-_](\d+)$"): "hand-written trainers",
    }
)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a checkpoint. `path` is relative to the main root, or absolute when it lies in another root."""

    name: str
    path: str
    absolute: str
    nbytes: int
    mtime_ns: int


def step_of(folder: Path) -> int | None:
    """Return the training step a folder's name, or its parent's, tells: `step-3`, `checkpoint-500`, `global_step10`.

    Args:
        folder: a checkpoint's folder.

    Returns:
        The number, or None.
    """
    for name in (folder.name, folder.parent.name):
        for pattern in STEP_FOLDERS:
            match = pattern.match(name)
            if match:
                return int(match[1])
    return None


def list_steps(root: Path) -> dict[int, list[str]]:
    """Return the step folders of a run's root.

    Args:
        root: an existing folder.

    Returns:
        Step → names of its folders (more than one when they are named in two ways).

    Raises:
        FormatError: the root cannot be listed.
    """
    steps: dict[int, list[str]] = {}
    for name in list_names(root):
        matches = [match for pattern in STEP_FOLDERS if name.endswith("/") and (match := pattern.match(name[:-1]))]
        for match in matches[:1]:
            steps.setdefault(int(match[1]), []).append(name[:-1])
    return steps


def list_names(folder: Path) -> list[str]:
    """Return the names of a folder's entries, sorted; folders end in `/`.

    Args:
        folder: an existing folder.

    Returns:
        Names.

    Raises:
        FormatError: it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(f"{entry.name}/" if _is_folder(entry) else entry.name for entry in entries)
    except OSError as error:
        raise unreadable(folder, error) from error


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link that leads to itself leads nowhere


def find_files(source: Source, inner: str, needed: Mapping[str, int], ranks: re.Pattern[str] | None = None) -> dict[str, FoundFile]:
    """Return where the files a checkpoint needs lie, each proven readable and long enough.

    Args:
        source: the roots, searched in order.
        inner: folder inside the main root the names count from, "" for the root itself. Other roots may have it or be it.
        needed: name → bytes the file must have at least.
        ranks: pattern whose first group is the rank in a file's name, to name the ranks lost; None where names tell no rank.

    Returns:
        Name → file.

    Raises:
        FormatError: files are missing, too short or unreadable; all of them are named.
    """
    found, missing, short = {}, [], []
    for name, nbytes in needed.items():
        file = find_file(source, inner, name)
        if file is None:
            missing.append(name)
        elif file.nbytes < nbytes:
            short.append(f"{name} has {file.nbytes} bytes of {nbytes}")
        else:
            found[name] = file
    if missing or short:
        raise _incomplete(source, inner, needed, missing, short, ranks)
    return found


def paths_of(source: Source, inner: str, name: str) -> list[Path]:
    """Return where a file may lie: in the main root, then in the others, which may have the inner folder or be it.

    Args:
        source: the roots.
        inner: folder inside the main root the name counts from, "" for the root itself.
        name: relative path.

    Returns:
        Paths in the order of preference, existing or not.
    """
    others = [folder / name for root in source.also for folder in dict.fromkeys((root / inner, root))]
    return [source.path / inner / name, *others]


def find_file(source: Source, inner: str, name: str) -> FoundFile | None:
    """Return the first file of that name in the roots, or None.

    Args:
        source: the roots, searched in order.
        inner: folder inside the main root the name counts from.
        name: relative path.

    Returns:
        The file, proven readable; None when no root has it.

    Raises:
        FormatError: it is there but cannot be read.
    """
    for path in paths_of(source, inner, name):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            status = os.fstat(handle)
        finally:
            os.close(handle)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("is not a file", where=str(path), remedy="Restore the file from another copy.")
        absolute = str(path.absolute())
        shown = str(Path(inner, name)) if path == source.path / inner / name else absolute
        return FoundFile(name, shown, absolute, status.st_size, status.st_mtime_ns)
    return None


def file_place(folder: Path, name: str) -> tuple[Locator, ...]:
    """Return where a file of a checkpoint's folder lies.

    Args:
        folder: the main root.
        name: relative path.

    Returns:
        The whole file; nothing for a folder.
    """
    path = folder / name
    return (Locator(name, 0, path.stat().st_size),) if path.is_file() else ()


def digest_files(metadata: Iterable[bytes], files: Iterable[FoundFile]) -> str:
    """Return what identifies a checkpoint as far as metadata can: sha256 over metadata bytes and every file's name, size and time.

    Args:
        metadata: bytes of the metadata files, in a fixed order.
        files: the files that hold values.

    Returns:
        64 hex digits.
    """
    digest = hashlib.sha256()
    for content in metadata:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    for file in sorted(files, key=lambda f: f.name):
        digest.update(f"{file.name}\0{file.nbytes}\0{file.mtime_ns}\n".encode())
    return digest.hexdigest()


def _incomplete(
    source: Source, inner: str, needed: Mapping[str, int], missing: list[str], short: list[str], ranks: re.Pattern[str] | None
) -> FormatError:
    lost = sorted({int(match[1]) for match in map(ranks.search, missing) if match}) if ranks else []
    parts = [f"{len(missing)} of {len(needed)} files are missing: {name_some(missing)}"] if missing else []
    parts += [f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} lost"] if lost else []
    parts += [f"cut short: {name_some(short)}"] if short else []
    return FormatError(
        f"incomplete save: {'; '.join(parts)}",
        where=", ".join(str(root) for root in ((source.path / inner), *source.also)),
        remedy="Restore the files, name the folders of the other nodes with --also, or export another step.",
    )
