"""The files of a DeepSpeed checkpoint: what their names say, and which save of a root is read.

    ROOT/latest                    text: the tag of the save written last
    ROOT/<tag>/                    one save; by default global_step<N>
        mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_optim_states.pt, ...

A root is also a Trainer's `checkpoint-N/` and accelerate's folder. "pp_rank" in these names is the data-parallel rank; "mp_rank" counts
tensor-parallel ranks and, for pipelines, stages. Files are taken by the table below, never by a pattern that catches others too.

Refused: a root whose `latest` is absent or points nowhere (no save is guessed), two files for one rank, files of several saves in one
folder, optimizer state that was left on NVMe.

Source: deepspeed 0.19.8, runtime/engine.py (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`), runtime/pipe/module.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from reports.errors import FormatError, name_some
from tasks.engine.containers.ranges import read_whole
from tasks.engine.formats.folders import list_names, paths_of
from tasks.engine.formats.reader import Source

MODEL, SHARDED_MODEL, OPTIM, LAYER, EXPERT, EXPERT_OPTIM = "model", "sharded model", "optimizer", "layer", "expert", "expert optimizer"
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
UNIVERSAL_FOLDER = "zero/"  # inside a save: one folder per parameter
OFFLOADED_FOLDER = "offloaded_tensors/"
INNER_ROOTS = ("", "pytorch_model/")  # accelerate may keep the root one folder deeper

# Names of a save's files → what they hold
FILES: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"^mp_rank_(?P<mp>\d{2,})_model_states\.pt$"): MODEL,  # ZeRO 0 to 2, pipelines
        re.compile(r"^zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_model_states\.pt$"): SHARDED_MODEL,  # ZeRO 3
        re.compile(r"^(?P<precision>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_?optim_states\.pt$"): OPTIM,
        re.compile(r"^layer_(?P<layer>\d{2,})(?:-model_(?P<mp>\d{2,}))?-model_states\.pt$"): LAYER,  # pipelines
        re.compile(r"^(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d{2,})_model_states\.pt$"): EXPERT,
        re.compile(r"^expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt$"): EXPERT_OPTIM,  # experts without ZeRO
    }
)
RANK = re.compile(r"zero_pp_rank_(\d+)_")


@dataclass(frozen=True, slots=True)
class NamedFile:
    """What a file's name says; numbers that it does not have are 0. `precision` is the prefix of optimizer files."""

    name: str
    kind: str
    dp: int
    mp: int
    layer: int
    expert: int
    precision: str


@dataclass(frozen=True, slots=True)
class Save:
    """One save: where its folder is, on every root, its tag, and what its files are called."""

    source: Source
    tag: str
    files: tuple[NamedFile, ...]

    @property
    def where(self) -> str:
        """Its folder, for messages."""
        return str(self.source.path)

    def of_kind(self, kind: str) -> list[NamedFile]:
        """Return the files of one kind, in the order of their numbers.

        Args:
            kind: MODEL, OPTIM and so on.

        Returns:
            Files, by mp rank, dp rank, layer and expert.
        """
        found = [file for file in self.files if file.kind == kind]
        return sorted(found, key=lambda file: (file.mp, file.dp, file.layer, file.expert))


def parse_name(name: str) -> NamedFile | None:
    """Return what a file's name says, or None for a file that is no part of a save.

    Args:
        name: of the file.

    Returns:
        Its kind and numbers.
    """
    for pattern, kind in FILES.items():
        match = pattern.match(name)
        if match:
            told = match.groupdict()
            numbers = {key: int(told.get(key) or 0) for key in ("dp", "mp", "layer", "expert")}
            return NamedFile(name, kind, **numbers, precision=told.get("precision") or "")
    return None


def is_save(folder: Path, *, universal: bool) -> bool:
    """Return whether a folder is one save.

    Args:
        folder: an existing folder.
        universal: whether a universal checkpoint is looked for, or what the ranks wrote.

    Returns:
        Whether it is.
    """
    names = list_names(folder)
    if universal:
        return UNIVERSAL_FOLDER in names and (any(map(parse_name, names)) or (folder / UNIVERSAL_FOLDER / "optimizer_state.pt").is_file())
    return UNIVERSAL_FOLDER not in names and any(parse_name(name) for name in names)


def list_tags(root: Path, *, universal: bool) -> list[str]:
    """Return the saves of a root.

    Args:
        root: an existing folder.
        universal: see `is_save`.

    Returns:
        Names of folders, sorted.
    """
    return [name[:-1] for name in list_names(root) if name.endswith("/") and is_save(root / name, universal=universal)]


def find_root(path: Path, *, universal: bool) -> str | None:
    """Return where a folder keeps its saves, or None when it has none.

    Args:
        path: an existing folder.
        universal: see `is_save`.

    Returns:
        The inner folder, "" for the folder itself.
    """
    for inner in INNER_ROOTS:
        root = path / inner
        if root.is_dir() and list_tags(root, universal=universal):
            return inner
        if root.is_dir() and not universal and _names_a_save(root):
            return inner
    return None


def locate_save(source: Source, *, universal: bool) -> Save:
    """Return the save that is read: the source itself, the tag asked for, or the one that `latest` names.

    Args:
        source: a save's folder or a root.
        universal: see `is_save`.

    Returns:
        The save, with the files of all roots.

    Raises:
        FormatError: no such save, or none is named the latest.
    """
    if is_save(source.path, universal=universal):
        tag = source.path.absolute().name
        if source.tag not in ("", tag):
            raise FormatError(
                f"is the save {tag}, not {source.tag}", where=str(source.path), remedy="Leave --tag out, or point at the root."
            )
        return Save(source, tag, _files_of(source))
    root = find_root(source.path, universal=universal) or ""
    tags = sorted({tag for folder in source.roots for tag in _tags_of(folder, root, universal=universal)})
    tag = source.tag or _latest_tag(source, root, tags, LATEST_UNIVERSAL if universal else LATEST)
    if tag not in tags:
        how = "--tag asks for" if source.tag else f"{LATEST_UNIVERSAL if universal else LATEST} points at"
        raise FormatError(f"{how} {tag!r}, which is no save here; {_saves(tags)}", where=str(source.path / root), remedy=_choose(tags))
    also = tuple(_inside(other, (f"{root}{tag}", tag, "")) for other in source.also)
    inside = replace(source, path=source.path / root / tag, also=also)
    return Save(inside, tag, _files_of(inside))


def _inside(folder: Path, inners: Sequence[str]) -> Path:
    # An other node's root may be like the main one, or the folder below it, or the save itself.
    return next(folder / inner for inner in inners if (folder / inner).is_dir())


def _tags_of(folder: Path, root: str, *, universal: bool) -> list[str]:
    return list_tags(_inside(folder, (root, "")), universal=universal)


def _latest_tag(source: Source, root: str, tags: list[str], pointer: str) -> str:
    for path in paths_of(source, root, pointer):
        if path.is_file():
            tag = read_whole(path).decode("utf-8", "backslashreplace").strip()
            if not tag or PurePosixPath(tag).name != tag or tag == "..":
                raise FormatError(f"names {tag[:60]!r}, which is no folder's name", where=str(path), remedy=_choose(tags))
            return tag
    raise FormatError(
        f"has no file {pointer!r} to say which save is the last; {_saves(tags)}", where=str(source.path / root), remedy=_choose(tags)
    )


def _saves(tags: list[str]) -> str:
    return f"there are {name_some(tags)}" if tags else "there is none"


def _choose(tags: list[str]) -> str:
    return f"Name the save: --tag {tags[-1]}." if tags else "Check the path, or whether the save has finished."


def _names_a_save(root: Path) -> bool:
    # A root that has lost its saves still is one: DeepSpeed leaves a script beside `latest`.
    names = list_names(root)
    return LATEST in names and "zero_to_fp32.py" in names


def _files_of(source: Source) -> tuple[NamedFile, ...]:
    names = sorted({name for folder in source.roots if folder.is_dir() for name in list_names(folder)})
    if OFFLOADED_FOLDER in names:
        raise FormatError(
            f"{OFFLOADED_FOLDER} holds optimizer state as NVMe swap files, so the optimizer files lack the real masters and moments",
            where=str(source.path),
            remedy="Save again with the optimizer offloaded to the CPU or not at all.",
        )
    files = [file for name in names if (file := parse_name(name)) is not None]
    _refuse_two_of_one(files, str(source.path))
    return tuple(files)


def _refuse_two_of_one(files: Sequence[NamedFile], where: str) -> None:
    seen: dict[tuple[str, int, int, int, int], str] = {}
    for file in files:
        key = (file.kind, file.dp, file.mp, file.layer, file.expert)
        if key in seen:
            raise FormatError(
                f"{seen[key]} and {file.name} are of the same rank: two saves in one folder, in different precision",
                where=where,
                remedy="Move away the files of the save that is not wanted.",
            )
        seen[key] = file.name
    if {MODEL, SHARDED_MODEL} <= {file.kind for file in files}:
        raise FormatError(
            "holds model states of ZeRO-3 and of another stage: two saves in one folder",
            where=where,
            remedy="Move away the files of the save that is not wanted.",
        )
