"""What a checkpoint says of its training state before its tensors are read: names, small objects through the closed list, 0-d tensors."""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod
from pathlib import Path
from types import MappingProxyType

from reports.errors import FormatError
from tasks.engine.containers.ranges import read_range
from tasks.engine.containers.state_pickle import flatten_state, read_state
from tasks.engine.formats.folders import list_names
from tasks.engine.formats.reader import CheckpointReader, Payload
from tasks.engine.tensors.catalog import OTHER_SLOT, Catalog, Fragment, SourceTensor, StateItem
from validators.drills.facts import Entry, Scalar, StateFacts
from validators.expectation import ITEMSIZE

MAX_OBJECT_NBYTES = 64_000_000  # larger ones are compared by digest and not opened
MAX_LEAVES = 100  # of one object: a generator's state is hundreds of numbers that say nothing one by one
# What of a file's name tells whose it is: DCP, ZeRO, Megatron, per-rank files, DCP in safetensors
_RANK_FILES = re.compile(
    r"(?:^|/)(__\d+)_\d+\.distcp$|(zero_pp_rank_\d+_mp_rank_\d+)_optim|(mp_rank_\d+(?:_\d+)*)/|(rank[_-]?\d+)[._]|^(shard-\d+)-model-"
)
# What of an item's name tells that it is of the optimizer, the schedule, random numbers or a layer
_COUNTS_NOTHING = re.compile(
    r"(?:^|\.)(?:optim|optimizer|lr_scheduler|opt_param_scheduler|scheduler|rng_?states?|random_states|rng)(?:[._/]|_\d|$)|\._extra_state$"
)
_DIGITS = re.compile(r"\d+")

# dtype → how the bytes of one little-endian value are read
_SCALARS: Mapping[str, Callable[[bytes], Scalar]] = MappingProxyType(
    {
        "F64": lambda raw: float(struct.unpack("<d", raw)[0]),
        "F32": lambda raw: float(struct.unpack("<f", raw)[0]),
        "F16": lambda raw: float(struct.unpack("<e", raw)[0]),
        "BF16": lambda raw: float(struct.unpack("<f", b"\0\0" + raw)[0]),
        "I64": lambda raw: int.from_bytes(raw, "little", signed=True),
        "I32": lambda raw: int.from_bytes(raw, "little", signed=True),
        "U8": lambda raw: raw[0],
        "BOOL": lambda raw: bool(raw[0]),
    }
)


def gather_facts(reader: CheckpointReader) -> StateFacts:
    """Return what a checkpoint says of its training state. Small objects and 0-d tensors are read, no other tensor.

    Args:
        reader: of a complete checkpoint.

    Returns:
        The facts; entries without digests.

    Raises:
        FormatError: the checkpoint is incomplete, or a 0-d tensor's record is damaged.
    """
    catalog = reader.catalog()
    values: dict[str, Scalar] = {key: _storable(value) for key, value in _read_scalars(catalog, reader.payload, catalog.state_tensors)}
    read, keys, unread = _read_items(catalog, catalog.state)
    values |= read
    entries = {entry.key: entry for entry in _entries(catalog)}
    tensors = [*catalog.tensors.values(), *catalog.state_tensors.values()]
    return StateFacts(
        catalog.format,
        catalog.root,
        catalog.step,
        entries,
        values,
        tuple(key for key in keys if key not in values),
        unread,
        tuple(list_names(Path(catalog.root))),
        _rank_names(catalog.table.files),
        max((tensor.last - tensor.first for tensor in tensors), default=0),
        catalog.notes,
    )


def gather_counters(catalog: Catalog, payload_of: Callable[[Fragment], Payload]) -> dict[str, Scalar]:
    """Return the plain values among which a trainer keeps its counters. For roots of many saves: of the optimizer, the schedule and the
    random numbers, which are most of the objects and count nothing that the trainer counts, nothing is opened.

    Args:
        catalog: of a complete checkpoint.
        payload_of: its reader's, for 0-d tensors.

    Returns:
        Key → value; what cannot be opened is left out.

    Raises:
        FormatError: a 0-d tensor's record is damaged.
    """
    tensors = [key for key in catalog.state_tensors if key.startswith(f"{OTHER_SLOT}/")]
    values = {key: _storable(value) for key, value in _read_scalars(catalog, payload_of, tensors)}
    read, _, _ = _read_items(catalog, [item for item in catalog.state if not _COUNTS_NOTHING.search(item.fqn)])
    return values | read


def count_ranks(catalog: Catalog) -> int:
    """Return how many ranks wrote a checkpoint.

    Args:
        catalog: its.

    Returns:
        Those that have files; 0 where names do not tell.
    """
    return len(_rank_names(catalog.table.files))


def _read_items(catalog: Catalog, items: Sequence[StateItem]) -> tuple[dict[str, Scalar], list[str], dict[str, str]]:
    # Values by key, all keys, and why an item was not read.
    values: dict[str, Scalar] = {item.fqn: _storable(item.value) for item in items if item.value is not None}
    keys: list[str] = []
    unread: dict[str, str] = {}
    for item in items:
        if item.value is not None:
            continue
        try:
            leaves = sorted(flatten_state(item.fqn, _open_item(catalog, item)), key=lambda leaf: leaf[0].count("."))
        except FormatError as error:
            unread[item.fqn] = error.what
            continue
        keys += [key for key, _ in leaves[:MAX_LEAVES]]
        if len(leaves) > MAX_LEAVES and not all(isinstance(value, str) for _, value in leaves):
            leaves = [leaf for leaf in leaves if _is_named(item.fqn, leaf[0])]
        values |= {key: _storable(value) for key, value in leaves if isinstance(value, Scalar)}
    return values, keys, unread


def _is_named(fqn: str, key: str) -> bool:
    # A field of the object itself, such as Trainer's step beside its long history; a place in a list of hundreds says nothing.
    inner = key.removeprefix(f"{fqn}.")
    return "." not in inner and not inner.isdigit()


def known_shape(catalog: Catalog, tensor: SourceTensor) -> tuple[int, ...]:
    """Return a tensor's shape; where its writer recorded none, the extent of the boxes that are there.

    Args:
        catalog: it is of.
        tensor: one of its tensors.

    Returns:
        Elements per dim.
    """
    if tensor.shape is not None:
        return tensor.shape
    offsets, shapes = catalog.boxes(tensor.fqn)
    return tuple(int(n) for n in (offsets + shapes).max(axis=0)) if len(offsets) else ()


def _entries(catalog: Catalog) -> Iterator[Entry]:
    for fqn, tensor in catalog.tensors.items():
        yield _entry(catalog, fqn, "model", tensor)
    for key, tensor in catalog.state_tensors.items():
        yield _entry(catalog, key, "other" if key.startswith(f"{OTHER_SLOT}/") else "state", tensor)
    for item in catalog.state:
        yield Entry(item.fqn, "object", item.dtype, item.shape, sum(place.nbytes for place in item.places))


def _entry(catalog: Catalog, key: str, role: str, tensor: SourceTensor) -> Entry:
    shape = known_shape(catalog, tensor)
    return Entry(key, role, tensor.dtype, shape, prod(shape) * ITEMSIZE[tensor.dtype])


def _read_scalars(catalog: Catalog, payload_of: Callable[[Fragment], Payload], keys: Iterable[str]) -> Iterator[tuple[str, Scalar]]:
    for key in keys:
        tensor = catalog.state_tensors[key]
        if tensor.shape is not None and prod(tensor.shape) == 1 and tensor.dtype in _SCALARS:
            for fragment in catalog.fragments(key)[:1]:
                payload = payload_of(fragment)
                yield key.removeprefix(f"{OTHER_SLOT}/"), _SCALARS[tensor.dtype](read_range(payload.path, payload.start, payload.nbytes))


def _storable(value: Scalar) -> Scalar:
    # NaN and the infinities become text: JSON has none.
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _rank_names(files: Sequence[str]) -> tuple[str, ...]:
    # Of the ways to name a rank, the one that names most.
    ways: dict[int, set[str]] = {}
    for match in filter(None, map(_RANK_FILES.search, files)):
        way = next(way for way, name in enumerate(match.groups()) if name is not None)
        ways.setdefault(way, set()).add(match[way + 1])
    names = max(ways.values(), key=len, default=set())
    return tuple(sorted(names, key=lambda name: ([int(digits) for digits in _DIGITS.findall(name)], name)))


def _open_item(catalog: Catalog, item: StateItem) -> object:
    if len(item.places) != 1:
        raise FormatError("lies in no single place" if item.places else "listed, not opened")
    place = item.places[0]
    path = str(Path(catalog.root) / place.path)
    if place.nbytes > MAX_OBJECT_NBYTES:
        raise FormatError(f"of {place.nbytes} bytes, not opened")
    if path.endswith(".json"):
        try:
            return json.loads(read_range(path, place.start, place.nbytes))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"is not valid JSON: {error}", where=path) from error
    return read_state(path, place.start, place.nbytes)
