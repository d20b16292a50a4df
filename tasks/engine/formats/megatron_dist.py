"""What Megatron-LM wrote with `--ckpt-format torch_dist`: DCP's files under Megatron's keys, read without Megatron.

Layers (and experts) of one kind are one stacked tensor with a layer (and an expert) axis in front; they are taken apart into the global
names that the legacy reader uses, so that one naming per family fits both. Gate and up rows are global here: nothing is repaired per rank.
Optimizer state under `optimizer.state.<slot>.<parameter>` is taken apart in the same way; buckets of a `dp_reshardable` optimizer are
megatron_reshardable's.

What is not sharded (args, counters) lies in `common.pt` until core 0.18 and in the entry `common_state` since 0.19. Where neither holds
args (NeMo), geometry is known all the same.

Refused: the zarr backend, incomplete saves, layouts of megatron_args.UNREAD.

Source: Megatron-LM core 0.12 to main, megatron/core/dist_checkpointing; facts held against files that 0.16.1 and main wrote.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError, name_some
from tasks.engine.containers.ranges import read_whole
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor, describe, locate_tensor
from tasks.engine.containers.torch_zip import Archive, open_archive
from tasks.engine.formats.dcp_metadata import DcpMetadata, Offset, SavedObject, SavedTensor
from tasks.engine.formats.folders import FoundFile, digest_files, find_file, find_files, list_names
from tasks.engine.formats.megatron_args import MEGATRON_GLOBALS, REMEDY, Arguments, Layout, read_layout
from tasks.engine.formats.megatron_facts import stated_facts
from tasks.engine.formats.megatron_fragments import boxes_of_fragment, original_shape
from tasks.engine.formats.megatron_integrity import check_integrity
from tasks.engine.formats.megatron_plans import DIST_GLOBALS
from tasks.engine.formats.megatron_reshardable import BUCKET, FlatTensor, UnfitError, find_flat_slots
from tasks.engine.formats.megatron_state import RELEASE, RESUMED, common_items, read_tracker, tracker_notes
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.formats.reader import CheckpointReader, Payload, Probe, Source
from tasks.engine.formats.state_dict import strip_wrappers
from tasks.engine.formats.torch_files import checked_record, open_torch_file
from tasks.engine.tensors.catalog import OTHER_SLOT, Catalog, Fragment, Locator, SourceTensor, StateItem, TableBuilder

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"
COMMON_ENTRY = "common_state/"
_BLOCK_NBYTES = 16 << 20
_RANK = re.compile(r"__(\d+)_\d+\.distcp$")
_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(?!\d)")
_EXPERT = re.compile(r"\.mlp\.experts\.experts\.(?=\d)")
_SLOT = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|param|fp32_param|momentum_buffer)\.(.+)$")
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_MASTERS = frozenset({"param", "fp32_param"})
_FLAT = "optimizer.distributed.dp_group_idx_"
_GATHERED = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/")
_EXTRA_STATE = re.compile(r"^(.*_extra_state)/shard_")


class MegatronDistReader(CheckpointReader):
    """Reads one torch_dist save of Megatron-LM.

    Args:
        source: an iteration's folder, or a run's root whose tracker says "release"; and the other nodes' roots.
    """

    name: ClassVar[str] = "megatron_dist"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._chunks: dict[tuple[str, int], Chunk] = {}
        self._leads: dict[str, Offset] = {}
        self._elements: dict[tuple[str, int, Offset], int] = {}

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` is a torch_dist folder, complete or not.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        folder = path / RELEASE if read_tracker(path) == RELEASE and (path / RELEASE).is_dir() else path
        names = list_names(folder)
        if METADATA in names and COMMON in names:
            return Probe(True, f"it has {METADATA} and {COMMON}")
        backend = _backend(folder) if BACKEND in names else ""
        if not backend and METADATA in names and _mentions(folder / METADATA, COMMON_ENTRY.encode()):
            return Probe(True, f"its {METADATA} has an entry {COMMON_ENTRY.rstrip('/')}")
        return Probe(True, f"{BACKEND} says {backend}") if backend else Probe(False, f"no {BACKEND} that names a sharded backend")

    def _locate(self, fragment: Fragment) -> Payload:
        locator = fragment.locator
        archive = open_archive(str(self._source.path.absolute() / locator.path), locator.start, locator.nbytes)
        view = self._view(archive, fragment)
        place = locate_tensor(archive, view, fragment.dtype)
        part_of = None if place.is_whole else checked_record(archive, place.record)
        return Payload(archive.path, place.start, place.nbytes, place.strides, place.crc32, part_of)

    def _view(self, archive: Archive, fragment: Fragment) -> StoredTensor:
        chunk, lead = self._chunks[fragment.locator.path, fragment.locator.start], self._leads[fragment.fqn]
        tensor = describe(archive)
        if not isinstance(tensor, StoredTensor) or DTYPES.get(tensor.dtype) != fragment.dtype or prod(tensor.shape) != prod(chunk.shape):
            found = f"{tensor.dtype} {tensor.shape}" if isinstance(tensor, StoredTensor) else type(tensor).__name__
            raise archive.refuse(f"{fragment.fqn}: the metadata says {fragment.dtype} {chunk.shape}, the item {found}; of two saves?")
        strides = _strides(tensor, chunk.shape)
        if strides is None:
            raise archive.refuse(f"{fragment.fqn}: the item of shape {tensor.shape} cannot be read as {chunk.shape}")
        depth = len(lead)
        element = self._elements.get((fragment.locator.path, fragment.locator.start, fragment.region.offset))
        if element is not None:
            region = fragment.region.shape
            steps = tuple(prod(region[dim + 1 :]) for dim in range(len(region)))
            return StoredTensor(tensor.dtype, tensor.storage, tensor.storage_offset + element, region, steps)
        inside = sum((at - first) * step for at, first, step in zip(lead, chunk.offset, strides, strict=False))
        return StoredTensor(tensor.dtype, tensor.storage, tensor.storage_offset + inside, chunk.shape[depth:], strides[depth:])

    def _make_catalog(self) -> Catalog:
        source = self._source
        inner = "" if METADATA in list_names(source.path) or BACKEND in list_names(source.path) else RELEASE
        folder = source.path / inner
        noted = check_integrity(source, inner, (METADATA, BACKEND, COMMON))
        content, metadata = _read_metadata(source, inner)
        files = find_files(source, inner, metadata.needed_nbytes(), _RANK)
        common, common_file = _read_common(source, inner, metadata, files)
        args = common.get("args")
        layout = read_layout(args.values, str(folder)) if isinstance(args, Arguments) else None
        sorted_out = _sort_items(metadata, layout.num_layers if layout else 0)
        flat, flat_notes = _find_flat(sorted_out, args.values if isinstance(args, Arguments) else {}, layout)
        builder = TableBuilder()
        tensors = {name: self._add(builder, name, tensor, metadata, files) for name, tensor in sorted_out.model.items()}
        if not tensors:
            raise FormatError("holds no model, only training state", where=str(folder), remedy="Point at a checkpoint of a model.")
        listed = {key: tensor for key, tensor in sorted_out.state.items() if not (flat and BUCKET.match(tensor.item.key))}
        state = {key: self._add(builder, key, tensor, metadata, files) for key, tensor in listed.items()}
        state |= {key: self._add_flat(builder, key, tensor, metadata, files) for key, tensor in flat.items()}
        step = common.get("iteration")
        found = [*files.values(), *([common_file] if common_file else [])]
        notes = [*tracker_notes(folder, step), *flat_notes]
        notes += [] if _backend(folder) else [f"{BACKEND} is missing or damaged, which is written last; what is exported is complete"]
        notes += [] if isinstance(args, Arguments) else ["no args in the checkpoint: nothing to hold the config against"]
        return Catalog(
            self.name,
            str(source.path.absolute()),
            step if type(step) is int else None,
            MappingProxyType(tensors),
            builder.build(),
            (*common_items(common), *_objects(sorted_out.objects, metadata, files)),
            digest_files([content], found),
            sum(file.nbytes for file in found),
            notes=(*source.notes, *notes),
            state_tensors=MappingProxyType(state),
            stated=MappingProxyType(stated_facts(args.values) if isinstance(args, Arguments) else {}),
            listed=noted,
        )

    def _add(
        self, builder: TableBuilder, name: str, tensor: "Slice", metadata: DcpMetadata, files: Mapping[str, FoundFile]
    ) -> SourceTensor:
        item, depth, first = tensor.item, len(tensor.lead), builder.nrows
        if item.dtype not in DTYPES:
            raise FormatError(f"{item.key} has dtype {item.dtype}, which a release cannot hold", where=metadata.where, remedy=REMEDY)
        self._leads[name] = tensor.lead
        for offset, shape in dict.fromkeys(tensor.chunks):  # what several ranks wrote is listed twice and stored once
            place = metadata.place(item.key, offset)
            path = files[place.path].path
            self._chunks[path, place.start] = Chunk(offset, shape)
            if tensor.whole in ((), item.shape):
                builder.add(offset[depth:], shape[depth:], path, place.start, place.nbytes)
                continue
            for region, element in boxes_of_fragment(tensor.whole[depth:], item.shape[depth:-1], offset[depth:], shape[-1]):
                self._elements[path, place.start, region.offset] = element
                builder.add(region.offset, region.shape, path, place.start, place.nbytes)
        return SourceTensor(name, (tensor.whole or item.shape)[depth:], DTYPES[item.dtype], first, builder.nrows)

    def _add_flat(
        self, builder: TableBuilder, name: str, tensor: FlatTensor, metadata: DcpMetadata, files: Mapping[str, FoundFile]
    ) -> SourceTensor:
        first = builder.nrows
        self._leads[name] = ()
        dtypes = {piece.item.dtype for piece in tensor.pieces}
        for piece in tensor.pieces:
            extents = dict(piece.item.chunks)
            for offset, region, element in piece.rows():
                place = metadata.place(piece.item.key, offset)
                path = files[place.path].path
                self._chunks[path, place.start] = Chunk(offset, extents[offset])
                self._elements[path, place.start, region.offset] = element
                builder.add(region.offset, region.shape, path, place.start, place.nbytes)
        return SourceTensor(name, tensor.shape, DTYPES[dtypes.pop()], first, builder.nrows)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a stacked tensor that one item holds."""

    offset: Offset
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer's (and expert's) part of a stacked tensor: `lead` are its indices on the axes in front, `chunks` those that hold it."""

    item: SavedTensor
    lead: Offset
    chunks: Sequence[tuple[Offset, tuple[int, ...]]]
    whole: tuple[int, ...] = ()  # the tensor's shape, where the item is stored in fragments


@dataclass(frozen=True, slots=True)
class Sorted:
    """A save's entries by what they are. Keys of `state` are those of `Catalog.state_tensors`."""

    model: Mapping[str, Slice]
    state: Mapping[str, Slice]
    objects: Sequence[SavedObject]


def _sort_items(metadata: DcpMetadata, num_layers: int) -> Sorted:
    items = list(metadata.items())
    tensors = {item.key: item for item in items if isinstance(item, SavedTensor)}
    shapes = {key: item.shape for key, item in tensors.items()}
    model: dict[str, Slice] = {}
    state: dict[str, Slice] = {}
    for key, item in tensors.items():
        slot = _SLOT.match(key)
        if not _STATE.match(key):
            _put(model, _take_apart(key, item, metadata.where, num_layers), metadata.where)
        elif slot is None or shapes.get(slot[2]) != (whole := _whole_shape(metadata, item, slot[2])):  # no parameter's
            state[f"{OTHER_SLOT}/{key}"] = Slice(item, (), _chunks(item, 0)[()])
        else:
            word = "master" if slot[1] in _MASTERS else slot[1]
            parts = _take_apart(slot[2], item, metadata.where, num_layers)
            _put(state, {slot_key(word, name): replace(part, whole=whole) for name, part in parts.items()}, metadata.where)
    return Sorted(model, state, [item for item in items if isinstance(item, SavedObject)])


def _find_flat(sorted_out: Sorted, args: Mapping[str, object], layout: Layout | None) -> tuple[dict[str, FlatTensor], list[str]]:
    # Where buckets hold each parameter's state, and what is to be said of them.
    if not any(_FLAT in key for key in sorted_out.state):
        return {}, list(_resumed(sorted_out))
    items = {part.item.key: part.item for part in sorted_out.state.values()}
    shapes = {name: part.item.shape[len(part.lead) :] for name, part in sorted_out.model.items()}
    try:
        return find_flat_slots(items, shapes, args, layout), [RESUMED["buckets"]]
    except UnfitError as error:
        return {}, [RESUMED["buckets"], f"the optimizer's tensors are listed and not told apart: {error}"]


def _resumed(sorted_out: Sorted) -> Iterator[str]:
    if any(_GATHERED.match(item.key) for item in sorted_out.objects):
        yield RESUMED["gathered"]
    elif any(not key.startswith(OTHER_SLOT) for key in sorted_out.state):
        yield RESUMED["parameters"]


def _whole_shape(metadata: DcpMetadata, item: SavedTensor, parameter: str) -> tuple[int, ...]:
    # Of an optimizer's tensor; its own shape, unless it is stored in fragments that are whole layers and experts.
    whole, depth = original_shape(metadata, item), len(_axes(parameter))
    return item.shape if whole is None or item.shape[:depth] != whole[:depth] else whole


def _axes(name: str) -> list[tuple[re.Pattern[str], str]]:
    # Where a stacked tensor's layer and expert go in its name, in the order of its axes.
    return [
        (pattern, stem)
        for pattern, stem in ((_LAYERS, "decoder.layers."), (_EXPERTS, ".mlp.experts.local_experts."))
        if pattern.search(name)
    ]


def _put(into: dict[str, Slice], parts: Mapping[str, Slice], where: str) -> None:
    twice = [name for name in parts if name in into]
    if twice:
        raise FormatError(f"{into[twice[0]].item.key} and {parts[twice[0]].item.key} are both {twice[0]}", where=where, remedy=REMEDY)
    into.update(parts)


def _take_apart(key: str, item: SavedTensor, where: str, num_layers: int) -> dict[str, Slice]:
    # Global names → slices of a stacked tensor; one name for one that is not stacked.
    name = _EXPERT.sub(".mlp.experts.local_experts.", strip_wrappers(key))
    axes = _axes(name)
    if len(item.shape) < len(axes):
        raise FormatError(f"{key} of shape {item.shape} lacks its layer or expert axis", where=where, remedy=REMEDY)
    if _LAYERS.search(name) and num_layers and item.shape[0] != num_layers:
        raise FormatError(f"{key} holds {item.shape[0]} layers, args say num_layers={num_layers}", where=where, remedy=REMEDY)
    made, chunks = {}, _chunks(item, len(axes))
    for lead in product(*(range(item.shape[axis]) for axis in range(len(axes)))):
        full = name
        for (pattern, stem), index in zip(axes, lead, strict=True):
            full = pattern.sub(f"{stem}{index}.", full, count=1)
        made[full] = Slice(item, lead, chunks.get(lead, ()))
    return made


def _chunks(item: SavedTensor, depth: int) -> dict[Offset, list[tuple[Offset, tuple[int, ...]]]]:
    # By their indices on the axes in front; those of ranks whose part is empty are left out.
    found: dict[Offset, list[tuple[Offset, tuple[int, ...]]]] = {} if depth else {(): []}
    for offset, shape in item.chunks:
        if prod(shape):
            for lead in product(*(range(offset[axis], offset[axis] + shape[axis]) for axis in range(depth))):
                found.setdefault(lead, []).append((offset, shape))
    return found


def _strides(tensor: StoredTensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    # Megatron stores a chunk without the axes it puts in front of it.
    extra = len(shape) - len(tensor.shape)
    if extra >= 0 and tensor.shape == shape[extra:] and all(n == 1 for n in shape[:extra]):
        return (0,) * extra + tensor.strides
    steps = tuple(prod(tensor.shape[d + 1 :]) for d in range(len(tensor.shape)))
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape))) if tensor.strides == steps else None


def _mentions(path: Path, text: bytes) -> bool:
    # Read in blocks: the metadata of a large model takes hundreds of megabytes.
    kept = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_NBYTES):
            if text in kept + block:
                return True
            kept = block[-len(text) :]
    return False


def _backend(folder: Path) -> str:
    # What metadata.json names, "" when it is another tool's file.
    try:
        held = json.loads((folder / BACKEND).read_bytes()[:4096])
    except (OSError, ValueError):
        return ""
    backend = held.get("sharded_backend") if isinstance(held, dict) else None
    return backend if isinstance(backend, str) else ""


def _read_metadata(source: Source, inner: str) -> tuple[bytes, DcpMetadata]:
    folder = source.path / inner
    backend = _backend(folder)
    if backend not in ("", "torch_dist"):
        raise FormatError(
            f"sharded backend {backend!r} is not read", where=str(folder / BACKEND), remedy="Convert it to torch_dist with Megatron."
        )
    file = find_file(source, inner, METADATA)
    if file is None:
        raise FormatError(
            f"incomplete save: {METADATA} is missing, which is written last; there are {name_some(list_names(folder))}",
            where=str(folder),
            remedy="Export another step, or name the other nodes' folders with --also.",
        )
    content = read_whole(file.absolute)
    return content, DcpMetadata(content, file.absolute, DIST_GLOBALS)


def _read_common(
    source: Source, inner: str, metadata: DcpMetadata, files: Mapping[str, FoundFile]
) -> tuple[Mapping[str, object], FoundFile | None]:
    file = find_file(source, inner, COMMON)
    entry = next((item.key for item in metadata.items() if item.key.startswith(COMMON_ENTRY)), None)
    if file is None and entry is None:
        raise FormatError(
            f"incomplete save: neither {COMMON} nor an entry {COMMON_ENTRY.rstrip('/')}",
            where=str(source.path / inner),
            remedy="Restore the file, or export another step.",
        )
    if file is not None:
        archive = open_torch_file(file.absolute)
    else:
        assert entry is not None
        place = metadata.place(entry, None)
        archive = open_archive(files[place.path].absolute, place.start, place.nbytes)
    held = describe(archive, MEGATRON_GLOBALS)
    held = held[0] if isinstance(held, list) and len(held) == 1 else held
    if not isinstance(held, dict):
        raise archive.refuse(f"holds a {type(held).__name__}, not the common state")
    return {str(key): value for key, value in held.items()}, file


def _objects(objects: Sequence[SavedObject], metadata: DcpMetadata, files: Mapping[str, FoundFile]) -> Iterator[StateItem]:
    # Extra states come once per layer and expert: they are listed together.
    extra: dict[str, list[Locator]] = {}
    for item in objects:
        place = metadata.place(item.key, None)
        locator = Locator(files[place.path].path, place.start, place.nbytes)
        match = _EXTRA_STATE.match(item.key)
        if match:
            extra.setdefault(match[1], []).append(locator)
        elif not item.key.startswith(COMMON_ENTRY):
            yield StateItem(item.key, "object", places=(locator,))
    yield from (StateItem(key, "object", places=tuple(places)) for key, places in extra.items())
