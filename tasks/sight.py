"""The saves of a run as they are seen from outside: which look complete, without opening them. For roots of ten thousand saves.

A save looks complete when its format's commit marker is there, every file that the marker's text names is there too, and every archive ends
as an archive does. Opening it (tasks.saves) also proves that its tensors are covered, and is a hundred times slower.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import MappingProxyType

from reports.paths import real_path
from tasks.engine.formats.folders import list_steps, step_of
from tasks.engine.formats.megatron_state import read_tracker
from tasks.listing import THINNED_NAME, TRAINER_STATE, Listing, list_files, mounts_in
from tasks.thinning import doomed_files, keeps_state_apart, state_files
from validators.drills.record import RECORD_NAME
from validators.retention.evidence import THINNED, SeenSave

GOING = re.compile(r"^\.(.+)\.shardwright-going$")  # a save that is being deleted
_PART = re.compile(rb"__\d+_\d+\.distcp")
_ZERO_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_TAIL_NBYTES = 66_000  # the end record of a zip and the longest comment
_END_RECORD = b"PK\x05\x06"


def see_saves(root: Path) -> tuple[SeenSave, ...]:
    """Return the saves under a run's root, without opening them.

    Args:
        root: an existing folder.

    Returns:
        Saves in numeric order of their steps. One that lacks the training state that others have apart is not complete.

    Raises:
        FormatError: the root cannot be listed.
    """
    steps, around = list_steps(root), _look_around(root)
    saves = [_see(root / name, step, around) for step in sorted(steps) for name in sorted(steps[step])]
    has_state = any(save.thinnable and save.is_complete for save in saves)
    lacking = "its training state is missing, which other saves have"
    return tuple(replace(save, cause=lacking) if has_state and save.is_complete and save.is_stateless else save for save in saves)


def see_save(folder: Path, step: int, root: Path) -> SeenSave:
    """Return one save, as `see_saves` does.

    Args:
        folder: the save.
        step: its number.
        root: the run's root.

    Returns:
        The save; not complete where it is gone.
    """
    return _see(folder, step, _look_around(root))


def list_going(root: Path) -> tuple[str, ...]:
    """Return the folders that an interrupted run left while it deleted them.

    Args:
        root: an existing folder.

    Returns:
        Names, sorted.
    """
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if GOING.match(entry.name) and entry.is_dir(follow_symlinks=False)))


@dataclass(frozen=True, slots=True)
class _Around:
    # What lies about the saves: what the writer's tracker says, and what is mounted below the root.
    tracker: str
    mounts: tuple[Path, ...]


def _look_around(root: Path) -> _Around:
    return _Around(read_tracker(root), mounts_in(real_path(root)))


def _see(folder: Path, step: int, around: _Around) -> SeenSave:
    if folder.is_symlink():
        return _see_link(folder, step)
    mount = next((point for point in around.mounts if point.is_relative_to(real_path(folder))), None)
    if mount is not None:
        return SeenSave(folder.name, step, 0, 0.0, f"{mount} is mounted in it")
    try:
        return _see_files(folder, step, around.tracker)
    except OSError as error:  # a trainer may delete its own saves meanwhile
        return SeenSave(folder.name, step, 0, 0.0, f"cannot be looked at: {error.strerror}")


def _see_link(folder: Path, step: int) -> SeenSave:
    # It is not acted on; but what it holds may name others.
    try:
        leaving, has_state = list_files(real_path(folder)).leaving(), (folder / TRAINER_STATE).is_file()
    except OSError:  # it leads nowhere, or to what is not mounted
        leaving, has_state = (), False
    return SeenSave(folder.name, step, 0, 0.0, "a link, which is not followed", leaving=leaving, holds_trainer_state=has_state)


def _see_files(folder: Path, step: int, tracker: str) -> SeenSave:
    files = list_files(folder)
    cause, thinnable = _judge(files)
    if not cause and _is_ahead(step, tracker):
        cause = f"step {step} is after {tracker}, the last its writer called finished"
    return SeenSave(
        folder.name,
        step,
        files.nbytes,
        files.saved_at,
        cause,
        thinnable=thinnable,
        thinnable_nbytes=sum(files.stats[name].st_size for name in thinnable),
        listing=files.digest(),
        leaving=files.leaving(),
        linked=files.linked(),
        is_stateless=not thinnable and keeps_state_apart(files),
        holds_trainer_state=TRAINER_STATE in files.stats,
    )


def _judge(files: Listing) -> tuple[str, tuple[str, ...]]:
    # Why it is not complete, and the files that thinning deletes, or has still to delete.
    try:
        doomed = doomed_files(files)
    except ValueError as error:
        return f"{THINNED_NAME} cannot be read: {error}", ()
    if doomed is not None:
        return THINNED, doomed
    cause = _nested(files) or _cause(files)
    state = () if cause else state_files(files)
    rest = Listing(files.folder, {name: stat for name, stat in files.stats.items() if name not in state})
    return cause, state if state and not _cause(rest) else ()  # of ZeRO-3 a Trainer may keep weights in the training state alone


def _nested(files: Listing) -> str:
    # A Trainer keeps DeepSpeed's folder inside its own; any other step in a step is somebody's backup.
    inner = {part for name in files.stats for part in PurePath(name).parts[:-1] if step_of(Path(part)) is not None}
    others = sorted(name for name in inner if not name.startswith("global_step"))
    return f"it holds another save, {others[0]}" if others else ""


def _is_ahead(step: int, tracker: str) -> bool:
    return tracker.isdigit() and step > int(tracker)


def _cause(files: Listing) -> str:
    temporary = next((name for name in files.stats if name.endswith((".tmp", ".partial", ".incomplete"))), "")
    if temporary:
        return f"{temporary} is of a write that has not finished"
    kind = next((kind for pattern, kind in _KINDS.items() if any(pattern.search(name) for name in files.stats)), None)
    if kind is None:
        return "no checkpoint that this product knows"
    return kind(files) or next((f"{name} is cut short" for name in files.stats if _is_cut(files, name)), "")


def _dcp(files: Listing) -> str:
    folders = {name.rpartition("/")[0] for name in files.stats if name.endswith((".distcp", ".metadata"))}
    for folder in sorted(folders):
        inner = f"{folder}/" if folder else ""
        if f"{inner}.metadata" not in files.stats:
            return f"{inner}.metadata is missing, which is written last"
        content = files.content(f"{inner}.metadata")
        if not content.endswith(b"."):
            return f"{inner}.metadata is cut short"
        lost = {name.decode() for name in _PART.findall(content)} - {
            name.removeprefix(inner) for name in files.stats if name.startswith(inner)
        }
        if lost:
            return f"{inner}{min(lost)} is missing"
    return ""


def _zero(files: Listing) -> str:
    ranks = {(int(match[2]), int(match[1])) for name in files.stats if (match := _ZERO_RANK.search(name))}
    models, width = {model for model, _ in ranks}, 1 + max((data for _, data in ranks), default=0)
    lost = {(model, data) for model in range(1 + max(models, default=0)) for data in range(width)} - ranks
    if lost:
        model, data = min(lost)
        return f"the optimizer states of zero_pp_rank_{data}_mp_rank_{model:02d} are missing"
    return "" if any(name.endswith("_model_states.pt") for name in files.stats) else "the model states are missing"


def _hugging_face(files: Listing) -> str:
    index = next((name for name in files.stats if name.endswith((".safetensors.index.json", ".bin.index.json"))), "")
    if not index:
        return ""
    try:
        needed = set(json.loads(files.content(index))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{index} is no index"
    lost = sorted(name for name in needed if name not in files.stats)
    return f"{lost[0]} is missing" if lost else ""


def _nothing_more(_: Listing) -> str:
    return ""


# What one of a save's files is called → what must be there besides; the first row that fits
_KINDS: Mapping[re.Pattern[str], Callable[[Listing], str]] = MappingProxyType(
    {
        re.compile(r"\.distcp$|(?:^|/)\.metadata$"): _dcp,
        re.compile(r"_optim_states\.pt$"): _zero,
        re.compile(r"(?:^|/)mp_rank_\d+(?:_\d+)*/model_optim_rng\.pt$"): _nothing_more,
        re.compile(r"(?:^|/)zero/.+/fp32\.pt$"): _nothing_more,
        re.compile(r"(?:^|/)(?:model|pytorch_model)[^/]*\.(?:safetensors|bin)(?:\.index\.json)?$"): _hugging_face,
    }
)
_ARCHIVE = re.compile(r"\.(?:distcp|pt|pth|bin)$")


def _is_cut(files: Listing, name: str) -> bool:
    nbytes = files.stats[name].st_size
    if name.endswith(".safetensors"):
        return _is_cut_safetensors(files.path(name), nbytes)
    if name == RECORD_NAME or not _ARCHIVE.search(name):
        return False
    with open(files.path(name), "rb") as file:
        if not name.endswith(".distcp") and file.read(2) != b"PK":
            return False  # a pickle of old: it has no end record
        file.seek(max(0, nbytes - 22))
        if file.read().startswith(_END_RECORD):
            return False
        file.seek(max(0, nbytes - _TAIL_NBYTES))
        return _END_RECORD not in file.read()


def _is_cut_safetensors(path: str, nbytes: int) -> bool:
    with open(path, "rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_nbytes <= nbytes:
            return True
        try:
            header = json.loads(file.read(header_nbytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, AttributeError, TypeError, IndexError):
            return True
    return 8 + header_nbytes + max(ends, default=0) != nbytes
