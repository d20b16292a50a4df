"""The saves of a run as they are seen from outside: which look complete, without opening them. For roots of ten thousand saves.

A save looks complete when its format's commit marker is there, every file that the marker's text names is there too, and every archive ends
as an archive does. Opening it (tasks.saves) also proves that its tensors are covered, and is a hundred times slower.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tasks.engine.formats.folders import list_steps
from tasks.engine.formats.megatron_state import read_tracker
from validators.drills.record import RECORD_NAME
from validators.retention.evidence import THINNED, SeenSave

GOING = re.compile(r"^\.(.+)\.shardwright-going$")  # a save that is being deleted
THINNED_NAME = "shardwright.thinned.json"  # in a save whose training state was deleted, or is being
_PART = re.compile(rb"__\d+_\d+\.distcp")
_ZERO_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_TAIL_NBYTES = 66_000  # the end record of a zip and the longest comment
_END_RECORD = b"PK\x05\x06"


@dataclass(frozen=True, slots=True)
class _Files:
    # A save's files: relative name → bytes.
    folder: Path
    nbytes: Mapping[str, int]

    def content(self, name: str) -> bytes:
        with open(self.path(name), "rb") as file:
            return file.read()

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


def see_saves(root: Path) -> tuple[SeenSave, ...]:
    """Return the saves under a run's root, without opening them.

    Args:
        root: an existing folder.

    Returns:
        Saves in numeric order of their steps.

    Raises:
        FormatError: the root cannot be listed.
    """
    steps, tracker = list_steps(root), read_tracker(root)
    return tuple(_see(root / name, step, tracker) for step in sorted(steps) for name in sorted(steps[step]))


def see_save(folder: Path, step: int, root: Path) -> SeenSave:
    """Return one save, as `see_saves` does.

    Args:
        folder: the save.
        step: its number.
        root: the run's root.

    Returns:
        The save; not complete where it is gone.
    """
    return _see(folder, step, read_tracker(root))


def list_going(root: Path) -> tuple[str, ...]:
    """Return the folders that an interrupted run left while it deleted them.

    Args:
        root: an existing folder.

    Returns:
        Names, sorted.
    """
    return tuple(sorted(name for name in os.listdir(root) if GOING.match(name)))


def _see(folder: Path, step: int, tracker: str) -> SeenSave:
    if folder.is_symlink():
        return SeenSave(folder.name, step, 0, 0.0, "a link, which is not followed")
    try:
        return _see_files(folder, step, tracker)
    except OSError as error:  # a trainer may delete its own saves meanwhile
        return SeenSave(folder.name, step, 0, 0.0, f"cannot be looked at: {error.strerror}")


def _see_files(folder: Path, step: int, tracker: str) -> SeenSave:
    stats = dict(_stats(str(folder), ""))
    files = _Files(folder, {name: stat.st_size for name, stat in stats.items()})
    saved_at = max((stat.st_mtime for stat in stats.values()), default=0.0)
    thinnable = _thinnable(files)
    return SeenSave(
        folder.name,
        step,
        sum(files.nbytes.values()),
        saved_at,
        _cause(files) or (f"step {step} is after {tracker}, the last its writer called finished" if _is_ahead(step, tracker) else ""),
        thinnable=thinnable,
        thinnable_nbytes=sum(files.nbytes[name] for name in thinnable),
    )


def _stats(folder: str, inner: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{inner}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _stats(entry.path, f"{name}/")
            else:
                yield name, entry.stat(follow_symlinks=False)


def _is_ahead(step: int, tracker: str) -> bool:
    return tracker.isdigit() and step > int(tracker)


def _cause(files: _Files) -> str:
    if THINNED_NAME in files.nbytes:
        return THINNED
    temporary = next((name for name in files.nbytes if name.endswith((".tmp", ".partial", ".incomplete"))), "")
    if temporary:
        return f"{temporary} is of a write that has not finished"
    kind = next((kind for pattern, kind in _KINDS.items() if any(pattern.search(name) for name in files.nbytes)), None)
    if kind is None:
        return "no checkpoint that this product knows"
    return kind(files) or next((f"{name} is cut short" for name in files.nbytes if _is_cut(files, name)), "")


def _dcp(files: _Files) -> str:
    folders = {name.rpartition("/")[0] for name in files.nbytes if name.endswith((".distcp", ".metadata"))}
    for folder in sorted(folders):
        inner = f"{folder}/" if folder else ""
        if f"{inner}.metadata" not in files.nbytes:
            return f"{inner}.metadata is missing, which is written last"
        content = files.content(f"{inner}.metadata")
        if not content.endswith(b"."):
            return f"{inner}.metadata is cut short"
        lost = {name.decode() for name in _PART.findall(content)} - {
            name.removeprefix(inner) for name in files.nbytes if name.startswith(inner)
        }
        if lost:
            return f"{inner}{min(lost)} is missing"
    return ""


def _zero(files: _Files) -> str:
    ranks = {(int(match[2]), int(match[1])) for name in files.nbytes if (match := _ZERO_RANK.search(name))}
    models, width = {model for model, _ in ranks}, 1 + max((data for _, data in ranks), default=0)
    lost = {(model, data) for model in range(1 + max(models, default=0)) for data in range(width)} - ranks
    if lost:
        model, data = min(lost)
        return f"the optimizer states of zero_pp_rank_{data}_mp_rank_{model:02d} are missing"
    return "" if any(name.endswith("_model_states.pt") for name in files.nbytes) else "the model states are missing"


def _hugging_face(files: _Files) -> str:
    index = next((name for name in files.nbytes if name.endswith((".safetensors.index.json", ".bin.index.json"))), "")
    if not index:
        return ""
    try:
        needed = set(json.loads(files.content(index))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{index} is no index"
    lost = sorted(name for name in needed if name not in files.nbytes)
    return f"{lost[0]} is missing" if lost else ""


def _nothing_more(_: _Files) -> str:
    return ""


# What one of a save's files is called → what must be there besides; the first row that fits
_KINDS: Mapping[re.Pattern[str], Callable[[_Files], str]] = MappingProxyType(
    {
        re.compile(r"\.distcp$|(?:^|/)\.metadata$"): _dcp,
        re.compile(r"_optim_states\.pt$"): _zero,
        re.compile(r"(?:^|/)mp_rank_\d+(?:_\d+)*/model_optim_rng\.pt$"): _nothing_more,
        re.compile(r"(?:^|/)zero/.+/fp32\.pt$"): _nothing_more,
        re.compile(r"(?:^|/)(?:model|pytorch_model)[^/]*\.(?:safetensors|bin)(?:\.index\.json)?$"): _hugging_face,
    }
)
_ARCHIVE = re.compile(r"\.(?:distcp|pt|pth|bin)$")


def _is_cut(files: _Files, name: str) -> bool:
    nbytes = files.nbytes[name]
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


def _thinnable(files: _Files) -> tuple[str, ...]:
    pattern = next((state for mark, state in _STATE_FILES.items() if any(mark.search(name) for name in files.nbytes)), None)
    return tuple(sorted(name for name in files.nbytes if pattern is not None and pattern.search(name)))
