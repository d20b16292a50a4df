"""The formats this product reads, and how a path becomes a reader.

A *run's root* is a folder of one training run with a checkpoint per step inside. Its newest complete step is read unless one is asked for;
steps passed over become notes.
"""

import stat
from collections.abc import Sequence
from pathlib import Path

from reports.errors import FormatError, HostilePickleError, name_some
from tasks.engine.containers.ranges import unreadable
from tasks.engine.formats.dcp import DcpReader
from tasks.engine.formats.dcp_hf import DcpSafetensorsReader
from tasks.engine.formats.folders import list_names, list_steps, step_of
from tasks.engine.formats.fsdp1_ranks import RankFilesReader
from tasks.engine.formats.hf import HuggingFaceReader
from tasks.engine.formats.megatron import MegatronReader
from tasks.engine.formats.megatron_dist import MegatronDistReader
from tasks.engine.formats.reader import CheckpointReader, Source
from tasks.engine.formats.universal import UniversalReader
from tasks.engine.formats.zero import ZeroReader

# Tried in this order; the first that recognises a folder reads it.
READERS: tuple[type[CheckpointReader], ...] = (
    MegatronDistReader,  # DCP's files with a metadata.json
    DcpReader,
    ZeroReader,  # before the weights that a Trainer writes beside it
    UniversalReader,
    MegatronReader,
    HuggingFaceReader,
    DcpSafetensorsReader,
    RankFilesReader,
)


def open_checkpoint(path: Path, *, also: Sequence[Path] = (), step: int | None = None, tag: str = "") -> CheckpointReader:
    """Return the reader of the checkpoint at `path`.

    Args:
        path: a checkpoint's folder, or a run's root.
        also: more roots of the same save, from the other nodes' local disks.
        step: which step of a run's root; None for the newest complete one.
        tag: which save of a folder that holds several (DeepSpeed); "" for the one its writer calls the latest.

    Returns:
        A reader. Of a run's root, its catalog has been made once, so that the step is known to be complete.

    Raises:
        HostilePickleError: the newest step's metadata asks for a global outside the closed list.
        FormatError: no format recognises the folder (each format's reason is given), no step is complete, or there is no such tag.
    """
    for folder in (path, *also):
        check_folder(folder)
    steps = list_steps(path)
    if steps and not any(kind.probe(path).matches for kind in READERS):
        return _open_step(path, tuple(also), steps, step, tag)
    named = tag or (_tag_of_step(path, steps[step]) if step in steps else "")
    found = step_of(path.absolute())
    if step is not None and not named and found != step:
        told = f"is step {found}, not step {step}" if found is not None else f"holds no numbered step, and step {step} was asked for"
        raise FormatError(told, where=str(path), remedy="Leave the step out, or name another source.")
    return _recognise(path, tag)(Source(path, tuple(also), tag=named))


def _tag_of_step(path: Path, names: list[str]) -> str:
    return next((name for name in names if any(kind.holds_tag(path, name) for kind in READERS)), "")


def check_folder(folder: Path) -> None:
    """Raise for what cannot hold a checkpoint, whatever its format.

    Args:
        folder: where the user says one is.

    Raises:
        FormatError: not there, not readable, not a folder, or empty.
    """
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except FileNotFoundError:
        raise FormatError("does not exist", where=str(folder), remedy="Check the path.") from None
    except OSError as error:
        raise unreadable(folder, error) from error
    if not is_folder:
        raise FormatError("is a file, a checkpoint is a folder", where=str(folder), remedy=f"Point at the folder: {folder.parent}")
    if not list_names(folder):
        raise FormatError("is an empty folder", where=str(folder), remedy="Check the path, or whether the save has finished.")


def _open_step(root: Path, also: tuple[Path, ...], steps: dict[int, list[str]], step: int | None, tag: str) -> CheckpointReader:
    if step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps)))
        raise FormatError(f"has no step {step}; there are {known}", where=str(root), remedy="Ask for one of these.")
    passed: list[str] = []
    codes: list[str] = []
    for number in [step] if step is not None else sorted(steps, reverse=True):
        names = steps[number]
        if len(names) > 1:
            raise FormatError(
                f"has step {number} more than once: {name_some(names)}", where=str(root), remedy="Point at one of the folders."
            )
        roots = tuple(other / names[0] if (other / names[0]).is_dir() else other for other in also)
        try:
            reader = _recognise(root / names[0], tag)(Source(root / names[0], roots, tuple(passed), tag))
            reader.catalog()
        except HostilePickleError:
            raise
        except FormatError as error:
            if step is not None:
                raise
            passed.append(f"{names[0]} passed over: {error}")
            codes.append(error.code)
        else:
            return reader
    what = f"has no complete step: {'; '.join(passed[:5])}"
    raise FormatError(what, where=str(root), remedy="Restore one of the steps.", code=codes[0])  # the newest one's


def _recognise(folder: Path, tag: str) -> type[CheckpointReader]:
    if tag:
        tagged = next((kind for kind in READERS if kind.holds_tag(folder, tag)), None)
        if tagged is not None:
            return tagged
    reasons = []
    for kind in READERS:
        probe = kind.probe(folder)
        if probe.matches and tag and not kind.has_tags:
            raise FormatError(f"is of format {kind.name}, which has no tags", where=f"--tag {tag}", remedy="Leave --tag out.")
        if probe.matches:
            return kind
        reasons.append(f"{kind.name}: {probe.because}")
    raise FormatError(
        f"not a checkpoint this product reads ({'; '.join(reasons)}); the folder holds {name_some(list_names(folder))}",
        where=str(folder),
        remedy="Point at the folder that holds the checkpoint's files.",
    )
