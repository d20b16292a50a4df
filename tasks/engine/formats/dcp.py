"""PyTorch Distributed Checkpoint: a `.metadata` pickle beside `.distcp` files, as written for FSDP, HSDP, TP and their mixtures.

An *item* of a `.distcp` file is a whole torch.save archive; a model tensor's chunk is one. Folders of torchtitan (model at the root of the
state dict), accelerate (`pytorch_model_fsdp_0/` beside `optimizer_0/`) and OLMo-core (`model_and_optim/`) are read from the outer or the
inner folder.

Refused: saves without `.metadata` or with parts missing, rank-local saves (`__0.metadata`), stream transforms.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py; accelerate 1.15, utils/fsdp_utils.py; torchtitan 0.3, checkpoint.py.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError, HostilePickleError, name_some
from tasks.engine.containers.ranges import read_whole
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor, describe, locate_tensor
from tasks.engine.containers.torch_zip import open_archive
from tasks.engine.formats.dcp_metadata import DcpMetadata, SavedObject, SavedTensor
from tasks.engine.formats.folders import FoundFile, digest_files, file_place, find_file, find_files, list_names, paths_of, step_of
from tasks.engine.formats.optimizer_state import find_slot
from tasks.engine.formats.reader import CheckpointReader, Payload, Probe, Source
from tasks.engine.formats.state_dict import find_model, name_in_model, strip_all
from tasks.engine.tensors.catalog import OTHER_SLOT, Catalog, Fragment, Locator, SourceTensor, StateItem, TableBuilder
from validators.drills.record import RECORD_NAME

METADATA_NAME = ".metadata"
MODEL_ONLY = " is not read, the model can be: "  # in the note of a save whose optimizer is broken
_RANK = re.compile(r"__(\d+)_\d+\.distcp$")
_RANK_METADATA = re.compile(r"__(\d+)\.metadata$")

# Folder inside a checkpoint that holds the model's DCP → who writes it
INNER_FOLDERS: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"pytorch_model_fsdp_\d+/$"): "accelerate, Hugging Face Trainer",
        re.compile(r"pytorch_model_\d+/$"): "accelerate before 0.23",
        re.compile(r"model_and_optim/$"): "OLMo-core",
    }
)

_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+/$")  # accelerate: a DCP save beside the model's


@dataclass(frozen=True, slots=True)
class SavedAs:
    """One item of a save: its `key` in the catalog, and what its writer put into the folder `inner` ("" for the save's own)."""

    key: str
    inner: str
    item: SavedTensor | SavedObject


class DcpReader(CheckpointReader):
    """Reads one DCP save.

    Args:
        source: its folder, and the other nodes' folders of the same save.
    """

    name: ClassVar[str] = "dcp"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._saved: list[SavedAs] = []

    def saved_as(self) -> tuple[SavedAs, ...]:
        """Return how the writer called what the catalog lists, for whoever asks torch's own loader for it.

        Returns:
            Tensors and objects, in the writer's order.
        """
        self.catalog()
        return tuple(self._saved)

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` is a DCP folder, complete or not.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        names = list_names(path)
        inner = _inner_folders(names)
        if METADATA_NAME in names:
            return Probe(True, "it has a .metadata file")
        parts = [name for name in names if name.endswith((".distcp", ".metadata", ".metadata.tmp"))]
        if parts:
            return Probe(True, f"it has {name_some(parts)}")
        if inner:
            return Probe(True, f"it has {name_some(inner)}")
        return Probe(False, "no .metadata and no .distcp file")

    def _locate(self, fragment: Fragment) -> Payload:
        path = str(self._source.path.absolute() / fragment.locator.path)
        archive = open_archive(path, fragment.locator.start, fragment.locator.nbytes)
        tensor = describe(archive)
        if not isinstance(tensor, StoredTensor):
            raise archive.refuse(f"{fragment.fqn}: the item holds a {type(tensor).__name__}, not a tensor; parts of two saves?")
        found = (DTYPES.get(tensor.dtype, tensor.dtype), tensor.shape)
        if found != (fragment.dtype, fragment.region.shape):
            promised = f"{fragment.dtype} {fragment.region.shape}"
            raise archive.refuse(f"{fragment.fqn}: the metadata says {promised}, the item {found[0]} {found[1]}; parts of two saves?")
        place = locate_tensor(archive, tensor, fragment.dtype)
        if not place.is_whole:
            archive.verify(place.record)
        return Payload(path, place.start, place.nbytes, place.strides, place.crc32)

    def _make_catalog(self) -> Catalog:
        source, inner = self._source, self._inner()
        file, content = self._metadata_file(inner)
        metadata = self._parse(content, file, inner)
        files = find_files(source, inner, metadata.needed_nbytes(), _RANK)
        items = list(metadata.items())
        model = find_model([item.path for item in items], file.absolute)
        tensors, rest, builder = [], [], TableBuilder()
        for item in items:
            fqn = name_in_model(item.path, model)
            if isinstance(item, SavedTensor) and fqn is not None:
                tensors.append((fqn, item))
            else:
                rest.append(item)
        if not tensors:
            raise FormatError(
                f"holds no model, only training state: {name_some(item.path[0] for item in items)}",
                where=str(source.path / inner),
                remedy="Point at the folder that holds the model's weights, often its sibling.",
            )
        names = strip_all((fqn for fqn, _ in tensors), file.absolute)
        notes = self._notes(inner, files)
        made = {names[fqn]: _add_tensor(builder, names[fqn], item, metadata, files, notes) for fqn, item in tensors}
        self._saved = [SavedAs(names[fqn], inner, item) for fqn, item in tensors]
        state = State(builder, notes, made, self._saved)
        state.add(rest, metadata, files, inner)
        neighbours = self._add_neighbours(inner, state)
        return Catalog(
            self.name,
            str(source.path.absolute()),
            step_of(source.path.absolute() / inner),
            MappingProxyType(made),
            builder.build(),
            (*state.items, *neighbours),
            digest_files([content], files.values()),
            sum(found.nbytes for found in files.values()),
            notes=(*source.notes, *notes),
            state_tensors=MappingProxyType(state.tensors),
        )

    def _add_neighbours(self, inner: str, state: "State") -> list[StateItem]:
        # What lies beside an inner model folder is the trainer's; optimizer folders are DCP saves of their own.
        if not inner:
            return []
        left = []
        for name in list_names(self._source.path):
            if _OPTIMIZER_FOLDER.match(name):
                try:
                    self._add_optimizer(name.rstrip("/"), state)
                except HostilePickleError:
                    raise
                except FormatError as error:
                    state.notes.append(f"{name}{MODEL_ONLY}{error}")
                    left.append(StateItem(name, "object"))
            elif name not in (f"{inner}/", RECORD_NAME):
                left.append(StateItem(name, "object", places=file_place(self._source.path, name)))
        return left

    def _add_optimizer(self, folder: str, state: "State") -> None:
        file, content = self._metadata_file(folder)
        metadata = self._parse(content, file, folder)
        files = find_files(self._source, folder, metadata.needed_nbytes(), _RANK)
        state.add(list(metadata.items()), metadata, files, folder)

    def _inner(self) -> str:
        names = list_names(self._source.path)
        inner = _inner_folders(names)
        if METADATA_NAME in names or not inner:
            return ""
        if len(inner) > 1:
            raise FormatError(
                f"holds {len(inner)} models: {name_some(inner)}", where=str(self._source.path), remedy="Point at one of these folders."
            )
        return inner[0].rstrip("/")

    def _metadata_file(self, inner: str) -> tuple[FoundFile, bytes]:
        folder = self._source.path / inner
        names = list_names(folder)
        file = find_file(self._source, inner, METADATA_NAME)
        if file is not None:
            if f"{METADATA_NAME}.tmp" in names:
                raise FormatError(
                    "a later save into this folder was interrupted (.metadata.tmp beside .metadata): its files are parts of two saves",
                    where=str(folder),
                    remedy="Export another step.",
                )
            content = read_whole(file.absolute)
            for path in paths_of(self._source, inner, METADATA_NAME):
                if path.exists() and read_whole(path) != content:
                    raise FormatError(f"is of another save than {file.absolute}", where=str(path), remedy="Name the folders of one save.")
            return file, content
        if any(_RANK_METADATA.match(name) for name in names):
            raise FormatError(
                "rank-local save (one __N.metadata per rank): the ranks' parts are not described as one checkpoint",
                where=str(folder),
                remedy="Save with collectives (no_dist=False, the default), so that one .metadata is written.",
            )
        raise FormatError(
            f"incomplete save: {METADATA_NAME} is missing, which is written last; there are {name_some(names)}{_gaps(names)}",
            where=str(folder),
            remedy="Export another step; if the save ran on local disks, name the other nodes' folders with --also.",
        )

    def _parse(self, content: bytes, file: FoundFile, inner: str) -> DcpMetadata:
        try:
            return DcpMetadata(content, file.absolute)
        except HostilePickleError:
            raise
        except FormatError as error:
            beside = [name for name in list_names(self._source.path / inner) if name.endswith(".distcp")]
            what = f"{error.what}; beside it are {name_some(beside)}{_gaps(beside)}"
            raise FormatError(what, where=error.where, remedy=error.remedy) from error

    def _notes(self, inner: str, files: Mapping[str, FoundFile]) -> list[str]:
        stale = [name for name in list_names(self._source.path / inner) if name.endswith(".distcp") and name not in files]
        return [f"{name_some(stale)} of an earlier save left aside: .metadata does not name them"] if stale else []


def _gaps(names: list[str]) -> str:
    # The ranks that have no file though a later one has; how many ranks there were is recorded in no file name.
    ranks = {int(match[1]) for match in map(_RANK.search, names) if match}
    lost = sorted(set(range(max(ranks, default=0))) - ranks)
    return f" and none of rank {', '.join(map(str, lost))}" if lost else ""


def _add_tensor(
    builder: TableBuilder, fqn: str, item: SavedTensor, metadata: DcpMetadata, files: Mapping[str, FoundFile], notes: list[str]
) -> SourceTensor:
    if item.dtype not in DTYPES:
        raise FormatError(
            f"{item.key} has dtype {item.dtype}, which a release cannot hold", where=metadata.where, remedy="Drop or cast it."
        )
    first, seen = builder.nrows, set()
    for box in item.chunks:
        if prod(box[1]) == 0:
            continue  # a rank whose part is empty: nothing is stored
        if box in seen:
            notes.append(f"{fqn}: the chunk at {box[0]} was saved by several ranks; the one the metadata points to is read")
            continue
        seen.add(box)
        place = metadata.place(item.key, box[0])
        builder.add(box[0], box[1], files[place.path].path, place.start, place.nbytes)
    return SourceTensor(fqn, item.shape, DTYPES[item.dtype], first, builder.nrows)


class State:
    """The training state of a save while it is collected.

    Args:
        builder: the table, which holds the model's rows already.
        notes: sentences for the report, added to.
        parameters: the model's names without wrappers.
        saved: how the writer called everything, added to.
    """

    def __init__(self, builder: TableBuilder, notes: list[str], parameters: Collection[str], saved: list[SavedAs]) -> None:
        self.notes, self._saved = notes, saved
        self.tensors: dict[str, SourceTensor] = {}
        self.items: list[StateItem] = []
        self._builder, self._parameters = builder, parameters

    def add(self, items: Iterable[SavedTensor | SavedObject], metadata: DcpMetadata, files: Mapping[str, FoundFile], inner: str) -> None:
        """Append entries.

        Args:
            items: what is not the model's.
            metadata: where they came from.
            files: where its files lie.
            inner: the folder they are in, as seen from the save's own.
        """
        for item in items:
            if isinstance(item, SavedObject):
                place = metadata.place(item.key, None)
                locator = Locator(files[place.path].path, place.start, place.nbytes)
                self.items.append(StateItem(item.key, "object", places=(locator,)))
                self._saved.append(SavedAs(item.key, inner, item))
            elif item.dtype not in DTYPES:
                self.items.append(StateItem(item.key, "tensor", item.shape, item.dtype))
            else:
                key = find_slot(item.path, self._parameters)
                key = f"{OTHER_SLOT}/{item.key}" if key is None or key in self.tensors else key
                self.tensors[key] = _add_tensor(self._builder, key, item, metadata, files, self.notes)
                self._saved.append(SavedAs(key, inner, item))


def _inner_folders(names: list[str]) -> list[str]:
    return [name for name in names if any(pattern.match(name) for pattern in INNER_FOLDERS)]
