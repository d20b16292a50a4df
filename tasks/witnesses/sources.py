"""What a source checkpoint holds, decoded a second time: for each tensor, the boxes that are stored and how to read them.

A decoder is a function from the source's root folders to `{name: stored boxes}`, one row of DECODERS. Names are stripped of the wrapper
prefixes that FSDP, activation checkpointing and compile put in, and of the top key ("model") that DCP's planner_data records.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from reports.errors import FormatError, name_some
from tasks.witnesses.boxes import Box, Ints, ReadBox, StoredBox, refuse_outside
from tasks.witnesses.dcp_metadata import DcpTensor, ItemPlace, read_dcp_metadata
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.megatron import decode_dist_masters, decode_megatron, decode_megatron_dist
from tasks.witnesses.torch_items import SavedTensor, list_tensors
from tasks.witnesses.zero import decode_universal, decode_zero

Stored = Mapping[str, tuple[StoredBox, ...]]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # anywhere in a name
_TOP_KEYS = frozenset({"model", "model_state", "model_state_dict", "module", "state_dict"})  # under which trainers put the model
_NESTS = frozenset({"app", "state"})  # one more level around model and optimizer: torch's tutorial, Composer
_REOPEN_NBYTES = 32 << 20  # an open safetensors file keeps every touched page resident


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without what FSDP, compile and DDP wrap around it.

    Args:
        name: as the trainer saved it.

    Returns:
        The model's own name.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, cuts: object) -> torch.Tensor: ...


class _Opened(Protocol):
    # What is used of the safetensors library's (untyped) open file.
    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_slice(self, name: str) -> _Slice: ...


@dataclass(frozen=True, slots=True)
class SafetensorsBox:
    """A box whose values are one tensor of a safetensors file, read by the safetensors library."""

    path: Path
    key: str
    box: Box

    @contextmanager
    def open(self) -> Iterator[ReadBox]:
        """Open the file, again after every 32 MiB read; the function inside reads any part of the tensor.

        Yields:
            The function.
        """
        yield _Reopening(self.path, self.key).read


class _Reopening:
    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key, self._nbytes = path, key, 0
        self._slice = self._open()

    def _open(self) -> _Slice:
        return cast("_Opened", safe_open(self._path, "pt")).get_slice(self._key)

    def read(self, offset: Ints, shape: Ints) -> torch.Tensor:
        if self._nbytes > _REOPEN_NBYTES:
            self._slice, self._nbytes = self._open(), 0
        cuts = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        values = self._slice[cuts or ...]
        self._nbytes += values.nbytes
        return values


def _decode_dcp(roots: tuple[Path, ...]) -> Stored:
    folder = find_dcp_folder(roots[0])
    inner = folder.relative_to(roots[0])
    searched = (folder, *(root / part for root in roots[1:] for part in (inner, ".")))
    tensors = read_dcp_metadata((folder / ".metadata").read_bytes())
    stored: dict[str, tuple[StoredBox, ...]] = {}
    for tensor in tensors:
        name = model_name(tensor)
        if name in stored:
            raise FormatError(f"two tensors are called {name} once wrappers are stripped", where=".metadata")
        stored[name] = tuple(_saved(searched, place) for place in tensor.places)
    return stored


def model_name(tensor: DcpTensor) -> str:
    """Return what a tensor of a `.metadata` is called in its model: its path without the top key and the wrappers.

    Args:
        tensor: as listed.

    Returns:
        The name; for training state, something no model has.
    """
    path = tensor.path[1:] if len(tensor.path) > 2 and tensor.path[0] in _NESTS and tensor.path[1] in _TOP_KEYS else tensor.path
    return strip_wrappers(".".join(path[1:] if len(path) > 1 and path[0] in _TOP_KEYS else path))


def _saved(folders: tuple[Path, ...], place: ItemPlace) -> SavedTensor:
    found = next((folder / place.path for folder in folders if (folder / place.path).is_file()), folders[0] / place.path)
    return SavedTensor(found, place.start, place.nbytes, None, place.box)


def _decode_hf(roots: tuple[Path, ...]) -> Stored:
    folder = roots[0]
    indexes = sorted(folder.glob("*.index.json"))
    if indexes:
        named = json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"]
        for name in set(named.values()):
            refuse_outside(name, indexes[0].name)
        files = [folder / name for name in sorted(set(named.values()))]
    else:
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise NotHeardError("no Hugging Face weight file", where=str(folder))
    stored: dict[str, tuple[StoredBox, ...]] = {}
    for file in files:
        for name, box in _boxes_of_file(file):
            if stored.setdefault(name, (box,)) != (box,):
                raise FormatError(f"{name} is in two files", where=str(folder))
    return stored


def _boxes_of_file(file: Path) -> Iterator[tuple[str, StoredBox]]:
    if file.suffix == ".bin":
        yield from ((strip_wrappers(key), stored) for key, stored in list_tensors(file).items())
        return
    with _open_safetensors(file) as opened:
        for key in opened.keys():  # noqa: SIM118  (an open safetensors file is no mapping)
            shape = tuple(opened.get_slice(key).get_shape())
            yield strip_wrappers(key), SafetensorsBox(file, key, Box((0,) * len(shape), shape))


def _decode_dcp_hf(roots: tuple[Path, ...]) -> Stored:
    # The files record where each shard begins, never the whole shape; a replicated tensor is in every rank's file, once is enough.
    stored: dict[str, dict[Box, StoredBox]] = {}
    for file in sorted(file for root in roots for file in root.glob("*.safetensors")):
        with _open_safetensors(file) as opened:
            places = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for key in opened.keys():  # noqa: SIM118  (an open safetensors file is no mapping)
                if key not in places:
                    raise FormatError(f"no saved_offsets for {key}", where=str(file))
                box = Box(tuple(places[key]["saved_offsets"]), tuple(opened.get_slice(key).get_shape()))
                stored.setdefault(strip_wrappers(key), {}).setdefault(box, SafetensorsBox(file, key, box))
    return {name: tuple(boxes.values()) for name, boxes in stored.items()}


@contextmanager
def _open_safetensors(file: Path) -> Iterator[_Opened]:
    try:
        with safe_open(file, "pt") as opened:
            yield cast("_Opened", opened)
    except SafetensorError as error:
        raise FormatError(f"the safetensors library refuses it: {error}", where=str(file)) from None


def find_dcp_folder(root: Path) -> Path:
    """Return the folder that has the `.metadata`: the root, or the one right below it that accelerate makes.

    Args:
        root: the checkpoint.

    Returns:
        The folder.

    Raises:
        NotHeardError: there is none, or several.
    """
    if (root / ".metadata").is_file():
        return root
    found = sorted(folder for folder in root.glob("pytorch_model_fsdp_*") if (folder / ".metadata").is_file())
    if len(found) != 1:
        raise NotHeardError(f"{len(found)} folders with a .metadata", where=str(root))
    return found[0]


def _refuse(why: str, _roots: tuple[Path, ...]) -> Stored:
    raise NotHeardError(why)


# By the format the plan names (its `source.format`).
DECODERS: Mapping[str, Callable[[tuple[Path, ...]], Stored]] = {
    "dcp": _decode_dcp,
    "dcp_hf": _decode_dcp_hf,
    "hf": _decode_hf,
    "zero": decode_zero,
    "universal": decode_universal,
    "megatron": decode_megatron,
    "megatron_dist": decode_megatron_dist,
    "fsdp1_ranks": partial(_refuse, "torch.load(weights_only=True) refuses the ShardedTensor pickles of per-rank FSDP1 files"),
}


# Of formats whose weights are the model's: the optimizer's masters instead.
MASTERS: Mapping[str, Callable[[tuple[Path, ...]], Stored]] = {"megatron_dist": decode_dist_masters}


def decode_masters(format_name: str, roots: tuple[Path, ...]) -> Stored:
    """Return the optimizer's masters of a checkpoint.

    Args:
        format_name: as the plan names it.
        roots: its folders, the main one first.

    Returns:
        Stored boxes by tensor name; of a tensor without a master, its own.

    Raises:
        NotHeardError: there is no second decoder of this format's optimizers.
        FormatError: damaged.
    """
    if format_name not in MASTERS:
        raise NotHeardError(f"the optimizers of format {format_name!r} are not decoded a second time")
    return MASTERS[format_name](roots)


def decode_source(format_name: str, roots: tuple[Path, ...]) -> Stored:
    """Return what a source checkpoint holds.

    Args:
        format_name: as the plan names it.
        roots: its folders, the main one first.

    Returns:
        Stored boxes by tensor name.

    Raises:
        NotHeardError: there is no second decoder for this format, or it does not find its files.
        FormatError: damaged.
    """
    if format_name not in DECODERS:
        raise NotHeardError(f"no second decoder for format {format_name!r}; there are {name_some(DECODERS)}")
    return DECODERS[format_name](roots)
