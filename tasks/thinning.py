"""Taking the training state out of a save whose weights lie in files of their own, marked so that a kill is told from a whole save.

The mark lists what is deleted, each file with its size and time: what has another one was written since by a trainer that came back to
this step, and is never touched.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from reports.errors import FormatError, HostilePickleError
from reports.write import replace_text
from tasks.engine.formats.readers import open_checkpoint
from tasks.listing import THINNED_NAME, Listing, list_files

# What one of a save's files is called → the files of the training state, where they are apart from the weights
_STATE_FILES: Mapping[re.Pattern[str], re.Pattern[str]] = MappingProxyType(
    {
        re.compile(r"^pytorch_model_fsdp_\d+/"): re.compile(
            r"^(?:optimizer_\d+/|random_states_\d+\.pkl$|scheduler(?:_\d+)?\.bin$|dl_state_dict|sampler)"
        ),
        re.compile(r"^trainer_state\.json$"): re.compile(
            r"^(?:optimizer\.(?:pt|bin)$|optimizer_\d+/|scheduler\.pt$|rng_state|scaler\.pt$|global_step\d+/)"
        ),
        re.compile(r"^mp_rank_\d+(?:_\d+)*/model_optim_rng\.pt$"): re.compile(r"^mp_rank_\d+(?:_\d+)*/distrib_optim\.pt$"),
    }
)
_WEIGHTS_APART = re.compile(
    r"^(?:pytorch_model_fsdp_\d+/|(?:model|pytorch_model)[^/]*\.(?:safetensors|bin)$|mp_rank_\d+(?:_\d+)*/model_optim_rng\.pt$)"
)


def state_files(files: Listing) -> tuple[str, ...]:
    """Return the files of a save's training state, where its format has them apart from the weights.

    Args:
        files: of the save.

    Returns:
        Names, sorted.
    """
    pattern = next((state for mark, state in _STATE_FILES.items() if any(mark.search(name) for name in files.stats)), None)
    return tuple(sorted(name for name in files.stats if pattern is not None and pattern.search(name)))


def keeps_state_apart(files: Listing) -> bool:
    """Return whether a save is of a format whose training state lies in files of its own, if it has any.

    Args:
        files: of the save.

    Returns:
        True for weights as accelerate, Trainer or a distributed optimizer of Megatron leave them.
    """
    return any(_WEIGHTS_APART.search(name) for name in files.stats)


def keeps_weights(save: Path, names: tuple[str, ...]) -> bool:
    """Return whether a save without its training state opens, and holds all tensors of the model, of the same shapes.

    What would be left is opened as a folder of links: a placeholder beside sharded weights looks like a release of them.

    Args:
        save: its folder.
        names: the files of the training state.

    Returns:
        False also where the save itself does not open.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name in list_files(save).stats.keys() - set(names):
            link = Path(scratch, save.name, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(save.absolute() / name)
        try:
            whole, rest = (open_checkpoint(folder).catalog().tensors for folder in (save, Path(scratch, save.name)))
        except (FormatError, HostilePickleError):
            return False
    return {name: tensor.shape for name, tensor in whole.items()} == {name: tensor.shape for name, tensor in rest.items()}


def doomed_files(files: Listing) -> tuple[str, ...] | None:
    """Return what a thinning that was begun has still to delete.

    Args:
        files: of the save.

    Returns:
        Names, none when it was finished; None where there is no mark, nothing was deleted yet or all is back, or the save was written again
        over it.

    Raises:
        ValueError: the mark is none.
    """
    if THINNED_NAME not in files.stats:
        return None
    marked = _read_mark(files.content(THINNED_NAME))
    found = {name: told for name, told in marked.items() if name in files.stats}
    is_same = all(_tell(files.stats[name]) == told for name, told in found.items())
    is_written_again = set(state_files(files)) - marked.keys()  # under other names, as by another version of the trainer
    return tuple(sorted(found)) if is_same and not is_written_again and len(found) < len(marked) else None


def is_thinned(files: Listing) -> bool:
    """Return whether a save's training state was deleted, or its deletion has begun.

    Args:
        files: of the save.

    Returns:
        True also where the mark cannot be read.
    """
    try:
        return doomed_files(files) is not None
    except (ValueError, OSError):
        return True


def _read_mark(content: bytes) -> Mapping[str, list[int]]:
    try:
        held = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    deleted = held.get("deleted") if isinstance(held, dict) else None
    if not isinstance(deleted, dict):
        raise ValueError("it lists no files")  # noqa: TRY004  # what the bytes say is at fault
    return deleted


def _tell(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns]


def thin(files: Listing, names: tuple[str, ...], refuse: Callable[[], None]) -> None:
    """Delete a save's training state. The mark first: a save without it is whole, one with it is never taken for a whole one.

    Args:
        files: of the save.
        names: what to delete.
        refuse: raises when somebody needs the save after all; it is asked when the mark is there.

    Raises:
        OSError: something could not be deleted; the mark says what.
    """
    mark = files.folder / THINNED_NAME
    if doomed_files(files) is None:
        replace_text(mark, json.dumps({"deleted": {name: _tell(files.stats[name]) for name in names}}, indent=1) + "\n")
        sync_folder(files.folder)
        try:
            refuse()
        except BaseException:
            mark.unlink()
            raise
    for name in (*names, *files.unfinished_marks()):
        (files.folder / name).unlink()
    inner = {parent for name in names for parent in Path(name).parents if parent != Path(".")}
    for parent in sorted(inner, key=lambda path: len(path.parts), reverse=True):
        if not any((files.folder / parent).iterdir()):
            (files.folder / parent).rmdir()


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows a folder's entries.

    Args:
        folder: an existing one.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
