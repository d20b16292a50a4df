"""One torch.save file per rank, whose ShardedTensors or DTensors record which boxes of which tensors they are.

Written by FSDP1 with SHARDED_STATE_DICT and by verl (`model_world_size_W_rank_R.pt`). A tensor that is neither is taken as replicated:
every rank's copy must hold the same values.

Refused: a rank's file missing; flat parameters (FSDP1 LOCAL_STATE_DICT), whose original shapes are in no file.

Source: torch 2.13, torch/distributed/fsdp/_state_dict_utils.py; verl 0.5, utils/checkpoint/fsdp_checkpoint_manager.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError, name_some
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor, collect_tensors, describe
from tasks.engine.containers.torch_zip import Archive
from tasks.engine.formats.distributed_pickles import PART_GLOBALS, Part, is_part
from tasks.engine.formats.folders import FoundFile, digest_files, file_place, find_files, list_names, step_of
from tasks.engine.formats.reader import CheckpointReader, Payload, Probe, Source
from tasks.engine.formats.state_dict import find_model, name_in_model, strip_all
from tasks.engine.formats.torch_files import TorchTensors, open_torch_file
from tasks.engine.tensors.catalog import Catalog, Fragment, Locator, SourceTensor, StateItem, TableBuilder
from tasks.engine.tensors.region import Region

REMEDY = "Restore the files of all ranks or export another step."
# Other files per rank → what they hold; listed as state, never opened
STATE_FILES: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"^optim\w*[._-]rank[_-]?\d+\.(?:pt|pth|bin)$"): "optimizer state",
        re.compile(r"^extra_state\w*_rank_\d+\.pt$"): "schedule and random number state (verl)",
    }
)

# Names of the ranks' files, with groups `world` (where the name tells) and `rank` → who writes them so
RANK_FILES: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"^model_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt$"): "verl",
        re.compile(
            r"^(?:pytorch_)?model\w*[._-]rank[_-]?(?P<rank>\d+)\.(?:pt|pth|bin)$"
        ): "fvcore's checkpointer, accelerate LOCAL_STATE_DICT",
    }
)
INNER_FOLDERS = ("actor/", "critic/")  # verl keeps one folder per role; the first present is read
_RANK = re.compile(r"rank[_-]?(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Box:
    region: Region
    tensor: StoredTensor
    archive: Archive
    file: FoundFile


class RankFilesReader(CheckpointReader):
    """Reads one save of such files.

    Args:
        source: its folder, and the other nodes' folders of the same save.
    """

    name: ClassVar[str] = "fsdp1_ranks"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._pickled = TorchTensors()

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` holds one file per rank.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        inner = _inner(path)
        found = _rank_files(list_names(path / inner))
        if found:
            return Probe(True, f"it has {inner}{next(iter(found))}")
        return Probe(False, "no model file per rank (model_world_size_W_rank_R.pt)")

    def _locate(self, fragment: Fragment) -> Payload:
        return self._pickled.payload(fragment)

    def _make_catalog(self) -> Catalog:
        source = self._source
        inner = _inner(source.path)
        folder = source.path / inner
        files = find_files(source, inner, dict.fromkeys(_all_ranks(source, inner, str(folder)), 0), _RANK)
        boxes: dict[str, list[_Box]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        state: dict[str, StateItem] = {}
        content = [_collect(file, boxes, shapes, state) for file in files.values()]
        if not boxes:
            raise FormatError(
                "holds no model, only training state", where=str(folder), remedy="Point at the folder of the model's weights."
            )
        short = strip_all(boxes, str(folder))
        builder, tensors = TableBuilder(), {}
        replicas: list[Fragment] = []
        for name, parts in boxes.items():
            tensors[short[name]] = self._add_tensor(builder, short[name], shapes[name], parts, replicas)
        return Catalog(
            self.name,
            str(source.path.absolute()),
            step_of(folder.absolute()),
            MappingProxyType(tensors),
            builder.build(),
            (*state.values(), *_state_files(source.path, inner)),
            digest_files(content, files.values()),
            sum(file.nbytes for file in files.values()),
            tuple(replicas),
            source.notes,
        )

    def _add_tensor(
        self, builder: TableBuilder, fqn: str, shape: tuple[int, ...], boxes: list[_Box], replicas: list[Fragment]
    ) -> SourceTensor:
        dtypes = sorted({box.tensor.dtype for box in boxes})
        if len(dtypes) > 1:
            files = name_some(box.file.name for box in boxes)
            raise FormatError(f"{fqn} is {' and '.join(dtypes)}; parts of two saves?", where=files, remedy=REMEDY)
        first, seen = builder.nrows, set()
        for box in boxes:
            offset, extent = box.region.offset, box.region.shape
            if prod(extent) == 0:
                continue  # a rank whose part is empty: nothing is stored
            code, start, nbytes = self._pickled.add(box.file.path, fqn, offset, box.archive, box.tensor)
            if box.region in seen:
                replicas.append(Fragment(fqn, box.region, code, Locator(box.file.path, start, nbytes), -1))
                continue
            seen.add(box.region)
            builder.add(offset, extent, box.file.path, start, nbytes)
        return SourceTensor(fqn, shape, _code(fqn, dtypes[0], boxes), first, builder.nrows)


def _collect(file: FoundFile, boxes: dict[str, list[_Box]], shapes: dict[str, tuple[int, ...]], state: dict[str, StateItem]) -> bytes:
    # Adds one rank's parts; returns the pickle's bytes for the digest.
    archive = open_torch_file(file.absolute)
    nest = collect_tensors(describe(archive, PART_GLOBALS), file.absolute, is_part)
    model = find_model(nest.keys(), file.absolute)
    for path, part in nest.items():
        name = name_in_model(path, model)
        shape = part.shape
        if name is None:
            key = ".".join(path)
            state.setdefault(key, StateItem(key, "tensor", shape))
            continue
        if shapes.setdefault(name, shape) != shape:
            raise FormatError(
                f"{name} has shape {shape}, in other ranks' files {shapes[name]}; parts of two saves?", where=file.absolute, remedy=REMEDY
            )
        found = part.boxes if isinstance(part, Part) else ((Region.whole(shape), part),)
        boxes.setdefault(name, []).extend(_Box(region, tensor, archive, file) for region, tensor in found)
    return archive.read("data.pkl")


def _code(fqn: str, dtype: str, boxes: list[_Box]) -> str:
    if dtype not in DTYPES:
        raise FormatError(f"{fqn} has dtype {dtype}, which a release cannot hold", where=boxes[0].file.absolute, remedy="Drop or cast it.")
    return DTYPES[dtype]


def _inner(path: Path) -> str:
    names = list_names(path)
    if _rank_files(names):
        return ""
    return next((inner for inner in INNER_FOLDERS if inner in names and _rank_files(list_names(path / inner))), "")


def _rank_files(names: list[str]) -> dict[str, re.Match[str]]:
    found = {}
    for name in names:
        match = next((match for pattern in RANK_FILES if (match := pattern.match(name))), None)
        if match:
            found[name] = match
    return found


def _state_files(root: Path, inner: str) -> list[StateItem]:
    return [
        StateItem(name, "object", places=file_place(root, f"{inner}{name}"))
        for name in list_names(root / inner)
        if any(pattern.match(name) for pattern in STATE_FILES)
    ]


def _all_ranks(source: Source, inner: str, where: str) -> list[str]:
    # The names of all ranks' files, present or not, in the order of ranks.
    folders = [source.path / inner, *(root / inner if (root / inner).is_dir() else root for root in source.also)]
    found: dict[str, re.Match[str]] = {}
    for folder in folders:
        found.update(_rank_files(list_names(folder)))
    patterns = {match.re for match in found.values()}
    worlds = {int(match["world"]) for match in found.values() if "world" in match.re.groupindex}
    if len(patterns) > 1 or len(worlds) > 1:
        raise FormatError(f"files of several saves are mixed: {name_some(found)}", where=where, remedy="Move away what does not belong.")
    ranks = {int(match["rank"]): name for name, match in found.items()}
    world = max(worlds, default=max(ranks) + 1)
    template = next(iter(ranks.values()))
    return [ranks.get(rank) or _rename(template, rank) for rank in range(world)]


def _rename(template: str, rank: int) -> str:
    # What another rank's file is called.
    return _RANK.sub(lambda match: match[0].replace(match[1], str(rank)), template)
