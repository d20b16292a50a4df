"""Hugging Face weights: safetensors or `.bin` files, sharded under an index or single; also a Trainer's `checkpoint-N/`.

The index is trusted, never the pattern of file names. Safetensors are preferred to `.bin` files, as transformers does.

Refused: shards without an index, an index and shards that disagree, shards the index does not name, adapters (no whole model).

Source: transformers 5.24, modeling_utils.py; huggingface-hub 2.0, serialization; transformers 5.24, trainer.py (files of a checkpoint).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError, name_some
from tasks.engine.containers.ranges import read_whole
from tasks.engine.containers.safetensors_file import read_safetensors
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import collect_tensors, describe, is_tensor
from tasks.engine.formats.folders import FoundFile, digest_files, file_place, find_files, list_names, step_of
from tasks.engine.formats.reader import CheckpointReader, Payload, Probe, Source
from tasks.engine.formats.state_dict import find_model, name_in_model, strip_all
from tasks.engine.formats.torch_files import TorchTensors, open_torch_file
from tasks.engine.tensors.catalog import Catalog, Fragment, SourceTensor, StateItem, TableBuilder

REMEDY = "Download or save the folder again, or export another checkpoint."

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
_ENTRIES: tuple[str, ...] = (INDEXES[0], SINGLES[0], INDEXES[1], SINGLES[1])  # in the order of preference
_WEIGHTS = re.compile(r"^(?:pytorch_)?model\b.*\.(?:safetensors|bin)$")
_SHARD = re.compile(r"^(?:pytorch_)?model-\d+-of-\d+\.(?:safetensors|bin)$")

# A Trainer's own files → what they hold; listed as state, never loaded
TRAINER_FILES: Mapping[re.Pattern[str], str] = MappingProxyType(
    {
        re.compile(r"^optimizer\.(?:pt|bin)$"): "optimizer state, by integer ids",
        re.compile(r"^scheduler\.(?:pt|bin)$"): "learning rate schedule",
        re.compile(r"^scaler\.pt$"): "loss scale",
        re.compile(r"^rng_state(?:_\d+)?\.pth$"): "random number state",
        re.compile(r"^random_states_\d+\.pkl$"): "random number state (accelerate)",
        re.compile(r"^trainer_state\.json$"): "step, epoch, log",
        re.compile(r"^training_args\.bin$"): "arguments, as arbitrary classes",
        re.compile(r"^custom_checkpoint_\d+\.pkl$"): "the trainer's own values (accelerate)",
        re.compile(r"^(?:dl_state_dict|sampler)(?:_\d+)?\.bin$"): "data position (accelerate)",
    }
)


@dataclass(frozen=True, slots=True)
class _Found:
    # One tensor of one file, before names are stripped.
    name: str
    shape: tuple[int, ...]
    dtype: str
    file: FoundFile
    start: int
    nbytes: int


class HuggingFaceReader(CheckpointReader):
    """Reads one folder of Hugging Face weights.

    Args:
        source: the folder; other roots may hold more of its shards.
    """

    name: ClassVar[str] = "hf"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._pickled = TorchTensors()

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` holds Hugging Face weights.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        names = list_names(path)
        for entry in _ENTRIES:
            if entry in names:
                return Probe(True, f"it has {entry}")
        shards = [name for name in names if _SHARD.match(name)]
        if shards:
            return Probe(True, f"it has {name_some(shards)}")
        return Probe(False, f"none of {', '.join(_ENTRIES)}")

    def _locate(self, fragment: Fragment) -> Payload:
        # Safetensors headers were proven by the catalog; a record of a .bin is looked at here.
        place = fragment.locator
        if place.path.endswith(".safetensors"):
            return Payload(str(self._source.path.absolute() / place.path), place.start, place.nbytes, None, None)
        return self._pickled.payload(fragment)

    def _make_catalog(self) -> Catalog:
        folder = self._source.path
        names = list_names(folder)
        entry, content, weight_map = self._entry(names)
        files = find_files(self._source, "", dict.fromkeys(sorted(set(weight_map.values()) or {entry}), 0))
        self._refuse_strays(names, entry, files)
        headers, state = [content], [StateItem(name, "object", places=file_place(folder, name)) for name in names if _is_trainer_file(name)]
        found = [tensor for file in files.values() for tensor in self._tensors(file, headers, state)]
        self._agree(weight_map, found, entry)
        short = strip_all((tensor.name for tensor in found), str(folder))
        builder, tensors = TableBuilder(), {}
        for tensor in found:
            fqn, first = short[tensor.name], builder.nrows
            builder.add((0,) * len(tensor.shape), tensor.shape, tensor.file.path, tensor.start, tensor.nbytes)
            tensors[fqn] = SourceTensor(fqn, tensor.shape, tensor.dtype, first, first + 1)
        return Catalog(
            self.name,
            str(folder.absolute()),
            step_of(folder.absolute()),
            MappingProxyType(tensors),
            builder.build(),
            tuple(state),
            digest_files(headers, files.values()),
            sum(file.nbytes for file in files.values()),
            notes=self._source.notes,
        )

    def _entry(self, names: list[str]) -> tuple[str, bytes, dict[str, str]]:
        # The index or single file, its bytes if it is an index, and tensor → file (empty for a single file).
        folder = self._source.path
        entry = next((entry for entry in _ENTRIES if entry in names), None)
        if entry is None:
            shards = [name for name in names if _SHARD.match(name)]
            raise FormatError(f"index is missing; there are {name_some(shards)}", where=str(folder), remedy=REMEDY)
        if entry in SINGLES:
            return entry, b"", {}
        content = read_whole(folder / entry)
        return entry, content, _weight_map(content, str(folder / entry))

    def _refuse_strays(self, names: list[str], entry: str, files: Mapping[str, FoundFile]) -> None:
        kind = ".bin" if ".bin" in entry else ".safetensors"
        strays = [name for name in names if _WEIGHTS.match(name) and name.endswith(kind) and name not in files]
        if strays:
            raise FormatError(
                f"stray weights beside {entry}: {name_some(strays)}; parts of two saves?",
                where=str(self._source.path),
                remedy="Move away what does not belong to this checkpoint.",
            )

    def _tensors(self, file: FoundFile, headers: list[bytes], state: list[StateItem]) -> Iterator[_Found]:
        if file.name.endswith(".safetensors"):
            stored = read_safetensors(file.absolute)
            headers.append(stored.header)
            for values in stored.tensors.values():
                yield _Found(values.name, values.shape, values.dtype, file, values.start, values.nbytes)
            return
        archive = open_torch_file(file.absolute)
        nest = collect_tensors(describe(archive), file.absolute, is_tensor)
        model = find_model(nest.keys(), file.absolute)
        for path, tensor in nest.items():
            name = name_in_model(path, model)
            if name is None:
                state.append(StateItem(".".join(path), "tensor", tensor.shape, DTYPES.get(tensor.dtype, tensor.dtype)))
            else:
                fqn = strip_all([name], file.absolute)[name]
                code, start, nbytes = self._pickled.add(file.path, fqn, (0,) * len(tensor.shape), archive, tensor)
                yield _Found(name, tensor.shape, code, file, start, nbytes)

    def _agree(self, weight_map: Mapping[str, str], found: list[_Found], entry: str) -> None:
        where = str(self._source.path / entry)
        if not found:
            raise FormatError("holds no tensor", where=where, remedy=REMEDY)
        if not weight_map:
            return
        stored = {(tensor.name, tensor.file.name) for tensor in found}
        absent = [f"{name} in {file}" for name, file in weight_map.items() if (name, file) not in stored]
        unnamed = [f"{name} in {file}" for name, file in stored if weight_map.get(name) != file]
        if absent or unnamed:
            parts = [f"tensors the index names but the shards lack: {name_some(absent)}"] if absent else []
            parts += [f"tensors in shards that the index does not name there: {name_some(unnamed)}"] if unnamed else []
            raise FormatError("; ".join(parts), where=where, remedy=REMEDY)


def _is_trainer_file(name: str) -> bool:
    return any(pattern.match(name) for pattern in TRAINER_FILES)


def _weight_map(content: bytes, where: str) -> dict[str, str]:
    try:
        index = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is not valid JSON: {error}", where=where, remedy=REMEDY) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError("has no weight_map of tensor and file names", where=where, remedy=REMEDY)
    for file in set(weight_map.values()):
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not file.endswith((".safetensors", ".bin")):
            raise FormatError(f"names {file!r}, which is no weight file of this folder", where=where, remedy=REMEDY)
    return weight_map
