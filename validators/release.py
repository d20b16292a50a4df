"""A release as it lies on disk (or as a plan will make it): files, headers, config. Its own reader; reads no tensor byte.

Safetensors header: 8 bytes little-endian length N, then N bytes of JSON, then the data section; offsets in the JSON count from the
data section. Source: safetensors 0.8 README, format section.

What cannot be parsed does not raise: it becomes a `Malformed` row for the `files` check to report.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from validators.gguf_file import SUFFIX, GgufFile, read_gguf

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers
MAX_NUMEL = 2**48  # elements; what is larger is no tensor but an attack on whoever allocates it
INDEX_NAME = "model.safetensors.index.json"
MANIFEST_NAME = "shardwright.json"
MARKER_NAME = "shardwright.committed"
# What git and the hub's client keep for themselves inside a folder of weights, and what an export keeps in its stage: no part of a release.
_BOOKKEEPING = (".git/", ".gitattributes", ".gitignore", ".cache/huggingface/")
STAGE_FOLDER = ".progress/"
WEIGHTS = (".safetensors", SUFFIX)
_PREFIX = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file. `start` and `stop` are byte offsets in the file's data section."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file. `nbytes` is its size; the data section starts at `data_start`; `twice` are keys its header holds again."""

    name: str
    nbytes: int
    data_start: int
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]
    twice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Malformed:
    """A file that could not be parsed, and why."""

    file: str
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """A folder of release weights. `folder` is None for one that is only planned. `ggufs` are its GGUF files.

    `index` is the parsed index (empty when there is none); `others` the remaining file names, relative, sorted. `assets` is where the
    tokenizer lies: the folder itself once written.
    """

    folder: Path | None
    files: tuple[WeightFile, ...]
    config: Mapping[str, object] = field(default_factory=dict)
    generation_config: Mapping[str, object] = field(default_factory=dict)
    index: Mapping[str, object] = field(default_factory=dict)
    manifest: Mapping[str, object] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    malformed: tuple[Malformed, ...] = ()
    assets: Path | None = None
    ggufs: tuple[GgufFile, ...] = ()

    @property
    def is_gguf(self) -> bool:
        """Whether its weights are in GGUF files alone."""
        return bool(self.ggufs) and not self.files

    def weight_files(self) -> dict[str, int]:
        """Return the files that hold weights.

        Returns:
            Bytes by name.
        """
        return {file.name: file.nbytes for file in self.files} | {file.name: file.nbytes for file in self.ggufs}

    def stored(self) -> Iterator[StoredTensor]:
        """Yield what is stored.

        Yields:
            Every tensor, file by file.
        """
        for file in self.files:
            yield from file.tensors

    def by_name(self) -> dict[str, StoredTensor]:
        """Return the stored tensors by name.

        Returns:
            Of a name stored twice, the last.
        """
        return {tensor.name: tensor for tensor in self.stored()}


@dataclass(slots=True)
class _Folder:
    # Collects what open_release finds.
    files: list[WeightFile] = field(default_factory=list)
    ggufs: list[GgufFile] = field(default_factory=list)
    malformed: list[Malformed] = field(default_factory=list)

    def read_weights(self, path: Path, name: str) -> None:
        if name.endswith(SUFFIX):
            self.ggufs.append(read_gguf(path, name))
        else:
            self.files.append(read_header(path, name))

    def parse_json(self, path: Path) -> Mapping[str, object]:
        if not path.is_file():
            return {}
        value = parse_json_object(path)
        if isinstance(value, str):
            self.malformed.append(Malformed(path.name, value))
            return {}
        return value


def open_release(folder: Path) -> Release:
    """Return the release in `folder` as its headers and config describe it.

    Args:
        folder: any folder with Hugging Face weights.

    Returns:
        The release; what could not be parsed is listed in `malformed`, not raised.
    """
    found = _Folder()
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    for name in names:
        if name.endswith(WEIGHTS):
            try:
                found.read_weights(folder / name, name)
            except (OSError, ValueError, RecursionError) as error:
                found.malformed.append(Malformed(name, str(error)))
    return Release(
        folder,
        tuple(found.files),
        config=found.parse_json(folder / "config.json"),
        generation_config=found.parse_json(folder / "generation_config.json"),
        index=found.parse_json(folder / INDEX_NAME),
        manifest=found.parse_json(folder / MANIFEST_NAME),
        others=tuple(name for name in names if not name.endswith(WEIGHTS)),
        malformed=tuple(found.malformed),
        assets=folder,
        ggufs=tuple(found.ggufs),
    )


def is_bookkeeping(name: str) -> bool:
    """Return whether a file belongs to git or to the hub's client and not to the release.

    Args:
        name: relative to the release's folder.

    Returns:
        Whether no loader reads it and no upload carries it.
    """
    return name.startswith(_BOOKKEEPING)


def parse_json_object(path: Path) -> Mapping[str, object] | str:
    """Return the JSON object in a file that nobody vouches for.

    Args:
        path: a file.

    Returns:
        The object, or why there is none.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        return "no file"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"not readable as JSON: {error}"
    return value if isinstance(value, dict) else "JSON, but not an object"


def keys_twice(path: Path) -> tuple[str, ...]:
    """Return the keys that stand more than once in one object of a JSON file.

    Args:
        path: a file; one that is absent or no JSON holds none.

    Returns:
        Keys, as often as they are repeated somewhere.
    """
    if not path.is_file():  # a pipe would be waited for
        return ()
    twice: list[str] = []
    try:
        json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _object(pairs, twice))
    except (OSError, ValueError, RecursionError):
        return ()  # reported as what cannot be parsed
    return tuple(twice)


def read_header(path: Path, name: str) -> WeightFile:
    """Return the header of one safetensors file, without judging its offsets.

    Args:
        path: the file.
        name: how the result should call it.

    Returns:
        Its tensors in the order of their offsets.

    Raises:
        ValueError: the header is absent, too long, not JSON, or its entries lack dtype, shape or offsets, or are impossible.
        RecursionError: the JSON is nested without end.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_PREFIX.size)
        if len(head) < _PREFIX.size:
            raise ValueError(f"{nbytes} bytes: too short for a safetensors header")
        (length,) = _PREFIX.unpack(head)
        if length > min(MAX_HEADER_BYTES, nbytes - _PREFIX.size):
            raise ValueError(f"header says {length} bytes, the file has {nbytes}")
        text = file.read(length).decode("utf-8")
    if not text.startswith("{"):
        raise ValueError("header does not begin with {")
    twice: list[str] = []
    header = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, twice))
    if not isinstance(header, dict):
        raise ValueError("header is not a JSON object")  # noqa: TRY004  (one error for a bad header)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of strings")
    tensors = sorted((_stored(name, key, entry) for key, entry in header.items()), key=lambda t: (t.start, t.stop))
    return WeightFile(name, nbytes, _PREFIX.size + length, tuple(tensors), metadata, tuple(twice))


def _object(pairs: Sequence[tuple[str, object]], twice: list[str]) -> dict[str, object]:
    # JSON lets a key stand twice and readers choose; safetensors disallows it. The last counts here.
    made = dict(pairs)
    if len(made) != len(pairs):
        twice += sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return made


def _stored(file: str, name: str, entry: object) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{name}: header entry is not an object")  # noqa: TRY004  (one error for a bad header)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    spans = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int and n >= 0 for n in offsets)
    if not (isinstance(dtype, str) and whole and spans):
        raise ValueError(f"{name}: header entry without a valid dtype, shape and data_offsets")
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if prod(shape) > MAX_NUMEL or offsets[1] > MAX_NUMEL:
        raise ValueError(f"{name}: shape {shape} at {offsets} is larger than any file")
    return StoredTensor(name, file, dtype, tuple(shape), offsets[0], offsets[1])


def sha256_of(path: Path) -> str:
    """Return a file's sha256.

    Args:
        path: the file.

    Returns:
        64 hex digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
