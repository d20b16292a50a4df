"""Unconsolidated DCP saves in safetensors: `shard-R-model-F-of-N.safetensors`, part F of the model as rank R holds it.

Each file records where its boxes begin (DCP_SHARDING_INFO), none how large the tensors are: the catalog's shapes are None, the plan takes
them from the config, and only then can coverage be proven. The number of ranks is recorded nowhere either.

Refused: a part that no rank has, files of two saves (different N), boxes without a recorded offset, a rank without files where a tensor's
first values are in none.

Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py and _hf_utils.py.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError, name_some
from tasks.engine.containers.safetensors_file import SafetensorsFile, read_safetensors
from tasks.engine.formats.folders import FoundFile, digest_files, find_files, list_names, step_of
from tasks.engine.formats.reader import CheckpointReader, Payload, Probe
from tasks.engine.formats.state_dict import strip_all
from tasks.engine.tensors.catalog import Catalog, Fragment, Locator, SourceTensor, TableBuilder
from tasks.engine.tensors.region import Region

REMEDY = "Restore the missing files or export another step."
SHARDING_INFO = "DCP_SHARDING_INFO"
INNER = "sharded/"  # where torchtitan and torch's consolidation keep the ranks' files
_NAME = re.compile(r"^shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class _Box:
    name: str
    region: Region
    dtype: str
    file: FoundFile
    start: int
    nbytes: int


class DcpSafetensorsReader(CheckpointReader):
    """Reads one unconsolidated save.

    Args:
        source: its folder, and the other nodes' folders of the same save.
    """

    name: ClassVar[str] = "dcp_hf"

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` holds the ranks' files of such a save.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        names = list_names(path)
        if any(_NAME.match(name) for name in names):
            return Probe(True, "it has shard-R-model-F-of-N.safetensors files")
        is_consolidated = any(name.endswith(".safetensors") for name in names)
        if INNER in names and not is_consolidated and any(_NAME.match(name) for name in list_names(path / INNER)):
            return Probe(True, f"it has {INNER}shard-R-model-F-of-N.safetensors files")
        return Probe(False, "no shard-R-model-F-of-N.safetensors file")

    def _locate(self, fragment: Fragment) -> Payload:
        # Safetensors record no checksum.
        place = fragment.locator
        return Payload(str(self._source.path.absolute() / place.path), place.start, place.nbytes, None, None)

    def _make_catalog(self) -> Catalog:
        source = self._source
        inner = "" if any(_NAME.match(name) for name in list_names(source.path)) else INNER.rstrip("/")
        folders = [source.path / inner, *(root / inner if (root / inner).is_dir() else root for root in source.also)]
        names = sorted({name for folder in folders for name in list_names(folder) if _NAME.match(name)})
        notes = _check_grid(names, str(source.path / inner))
        files = find_files(source, inner, dict.fromkeys(names, 0))
        stored = [(file, read_safetensors(file.absolute)) for file in files.values()]
        boxes: dict[str, list[_Box]] = {}
        for file, header in stored:
            for box in _boxes(file, header):
                boxes.setdefault(box.name, []).append(box)
        if notes:
            _refuse_holes(boxes, notes[0], str(source.path / inner))
        short = strip_all(boxes, str(source.path))
        builder, tensors = TableBuilder(), {}
        replicas: list[Fragment] = []
        for name, parts in boxes.items():
            fqn = short[name]
            tensors[fqn] = _add_tensor(builder, fqn, parts, replicas)
        return Catalog(
            self.name,
            str(source.path.absolute()),
            step_of(source.path.absolute()),
            MappingProxyType(tensors),
            builder.build(),
            (),
            digest_files([header.header for _, header in stored], files.values()),
            sum(file.nbytes for file in files.values()),
            tuple(replicas),
            (*source.notes, *notes),
        )


def _check_grid(names: Iterable[str], where: str) -> list[str]:
    # Ranks by parts. A part that no rank has is missing; a rank that has none of the parts may only be missing.
    cells = [tuple(map(int, match.groups())) for match in map(_NAME.match, names) if match]
    totals = sorted({total for _, _, total in cells})
    if len(totals) > 1:
        raise FormatError(f"files of saves with {' and '.join(map(str, totals))} parts are mixed", where=where, remedy=REMEDY)
    lost = sorted(set(range(1, totals[0] + 1)) - {part for _, part, _ in cells})
    if lost:
        raise FormatError(
            f"incomplete save: no rank has part {', '.join(map(str, lost))} of {totals[0]}",
            where=where,
            remedy="Restore the files, name the folders of the other nodes with --also, or export another step.",
        )
    ranks = {rank for rank, _, _ in cells}
    gaps = sorted(set(range(1, max(ranks) + 1)) - ranks)
    return [f"no files of shard {', '.join(map(str, gaps))}, though there are some of shard {max(ranks)}"] if gaps else []


def _refuse_holes(boxes: Mapping[str, list[_Box]], gap: str, where: str) -> None:
    # Ranks without a file may have held nothing. Where values lie in front of those that are there, they did.
    holed = [name for name, parts in boxes.items() if _has_hole(parts)]
    if holed:
        raise FormatError(
            f"incomplete save: files are missing: {gap}, and values of {name_some(holed)} are in no file",
            where=where,
            remedy="Restore the files, name the folders of the other nodes with --also, or export another step.",
        )


def _has_hole(parts: Sequence[_Box]) -> bool:
    # Boxes do not overlap, but for those stored twice: without a hole they fill the box around them, which begins at zero.
    regions = {part.region for part in parts if prod(part.region.shape)}
    ends = [tuple(map(sum, zip(one.offset, one.shape, strict=True))) for one in regions]
    return bool(regions) and sum(prod(one.shape) for one in regions) < prod(max(sizes) for sizes in zip(*ends, strict=True))


def _boxes(file: FoundFile, header: SafetensorsFile) -> list[_Box]:
    try:
        info = json.loads(header.metadata[SHARDING_INFO])
    except KeyError:
        raise FormatError(f"does not record {SHARDING_INFO}", where=file.absolute, remedy=REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{SHARDING_INFO} is not valid JSON: {error}", where=file.absolute, remedy=REMEDY) from error
    if not isinstance(info, dict):
        raise FormatError(f"{SHARDING_INFO} is not an object", where=file.absolute, remedy=REMEDY)
    made = []
    for values in header.tensors.values():
        entry = info.get(values.name)
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != len(values.shape) or not all(type(n) is int and n >= 0 for n in offsets):
            raise FormatError(f"{values.name}: no valid offset is recorded for its box", where=file.absolute, remedy=REMEDY)
        made.append(_Box(values.name, Region(tuple(offsets), values.shape), values.dtype, file, values.start, values.nbytes))
    return made


def _add_tensor(builder: TableBuilder, fqn: str, boxes: list[_Box], replicas: list[Fragment]) -> SourceTensor:
    kinds = sorted({(box.dtype, len(box.region.shape)) for box in boxes})
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} of {ndim} dims" for dtype, ndim in kinds)
        raise FormatError(f"{fqn} is {found}; parts of two saves?", where=name_some(box.file.name for box in boxes), remedy=REMEDY)
    first, dtype, seen = builder.nrows, boxes[0].dtype, set()
    for box in sorted(boxes, key=lambda box: (box.region.offset, box.file.name)):
        if prod(box.region.shape) == 0 and len(boxes) > 1:
            continue  # a rank whose part is empty: nothing is stored
        if box.region in seen:
            replicas.append(Fragment(fqn, box.region, dtype, Locator(box.file.path, box.start, box.nbytes), -1))
            continue
        seen.add(box.region)
        builder.add(box.region.offset, box.region.shape, box.file.path, box.start, box.nbytes)
    return SourceTensor(fqn, None, dtype, first, builder.nrows)
