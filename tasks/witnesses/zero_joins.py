"""The parts of a DeepSpeed save's tensor-parallel ranks, joined a second time.

What `universal_checkpoint_info` says of a parameter becomes a list of strips: rows of a rank's part, and the index in the whole where they
begin. A geometric map (`affine_map`) is believed before the lists of patterns; not heard where it cuts inside rows or scales.

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py (`merge_tp_slices`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tasks.witnesses.boxes import Box, Ints, StoredBox
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.torch_items import RawTensor

Boxes = tuple[StoredBox, ...]
_FILE = "universal_checkpoint_info.json"
_Strip = tuple[int, int, int, Ints]  # rank, first row of its part, how many, where they begin in the whole


def tp_degree(held: Mapping[str, object], num_files: int) -> int:
    """Return how many tensor-parallel ranks a save has.

    Args:
        held: the model states of global rank 0.
        num_files: how many mp ranks wrote model states.

    Returns:
        1 or more.
    """
    degrees = held.get("checkpoint_parallel_dimensions")
    told = degrees.get("tp_degree") if isinstance(degrees, dict) else None
    if isinstance(told, int):
        return told
    return num_files if isinstance(held.get("module"), dict) else 1


def join_stages(
    parts: Sequence[Mapping[str, Boxes]], held: Mapping[str, object], roots: tuple[Path, ...], degree: int
) -> list[Mapping[str, Boxes]]:
    """Return what each pipeline stage holds, whole.

    Args:
        parts: by mp rank, what it holds.
        held: the model states of global rank 0.
        roots: folders of the save.
        degree: tensor-parallel ranks of a stage.

    Returns:
        One mapping per stage.

    Raises:
        NotHeardError: nothing says how parts join, or in words that this reading does not know.
    """
    if degree == 1:
        return list(parts)
    told = _told(held, roots)
    names = held.get("buffer_names")
    buffers = set(names) if isinstance(names, list) else set()
    made: list[Mapping[str, Boxes]] = []
    for start in range(0, len(parts), degree):
        stage = parts[start : start + degree]
        made.append({name: stage[0][name] if name in buffers else _join(name, [own[name] for own in stage], told) for name in stage[0]})
    return made


def _told(held: Mapping[str, object], roots: tuple[Path, ...]) -> Mapping[str, object]:
    told = held.get("universal_checkpoint_info")
    if told is None:
        paths = [root / _FILE for root in roots]
        path = next((path for path in paths if path.is_file()), None)
        told = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    if not isinstance(told, dict):
        raise NotHeardError("nothing says how the parts of tensor-parallel ranks join", where=str(roots[0]))
    return told


def _join(name: str, parts: Sequence[Boxes], told: Mapping[str, object]) -> Boxes:
    shapes = [_extent(boxes) for boxes in parts]
    strips = list(_mapped(name, shapes, told) or _strips(name, shapes, told))
    if any(re.match(pattern, name) for pattern in _list(told, "vocabulary_parameter_patterns")) and len(strips) > 1:
        most = told.get("original_vocab_size")
        assert isinstance(most, int)
        strips = [(rank, first, min(rows, max(0, most - at[0])), at) for rank, first, rows, at in strips]
    return tuple(box for strip in strips for box in _moved(strip, parts[strip[0]], shapes[strip[0]]))


def _mapped(name: str, shapes: Sequence[Ints], told: Mapping[str, object]) -> list[_Strip]:
    # Empty where no map is of this parameter.
    maps = told.get("affine_map")
    params = maps.get("params", {}) if isinstance(maps, dict) else {}
    held: dict[str, Any] = next((held for pattern, held in params.items() if re.match(pattern, name)), {})
    strips = []
    for rank, own in sorted(held.get("ranks", {}).items()):
        for piece in own["pieces"]:
            rows, line = (piece["shape"] or [1])[0], prod(shapes[rank][1:])
            is_of_rows = tuple(piece["shape"][1:]) == shapes[rank][1:] and piece["dest"][0] % line == 0
            if not is_of_rows or piece.get("scale", 1) != 1:
                raise NotHeardError("parts that a map cuts inside rows, or scales", where=name)
            at = tuple(int(i) for i in np.unravel_index(piece["source"][0], held["logical_shape"])) if rows else (0,) * len(shapes[rank])
            if rank == min(piece["locations"]):
                strips.append((rank, piece["dest"][0] // line, rows, at))
    return strips


def _strips(name: str, shapes: Sequence[Ints], told: Mapping[str, object]) -> Iterator[_Strip]:
    def matches(key: str) -> bool:
        return any(re.match(pattern, name) for pattern in _list(told, key))

    zeros = (0,) * len(shapes[0])
    if matches("tp_replicated_parameter_patterns") or matches("parameter_to_average_patterns"):
        yield 0, 0, _rows(shapes[0]), zeros
        return
    fused = [[shape[0] // 2 for shape in shapes]] * 2 if matches("parameter_with_2_sub_params_cat_dim_0") else _fused(name, shapes, told)
    if fused is None and matches("parameter_with_row_parallelism_patterns"):
        column = 0
        for rank, shape in enumerate(shapes):
            yield rank, 0, _rows(shape), (0, column, *zeros[2:])
            column += shape[1]
        return
    row, done = 0, [0] * len(shapes)
    for own in fused or [[shape[0] for shape in shapes]]:
        for rank, rows in enumerate(own):
            yield rank, done[rank], rows, (row, *zeros[1:])
            done[rank] += rows
            row += rows


def _fused(name: str, shapes: Sequence[Ints], told: Mapping[str, object]) -> list[list[int]] | None:
    # Rows of each parameter in a fused one, by rank.
    for entry in _list(told, "parameter_with_sub_params"):
        for pattern in entry["patterns"]:
            if not re.match(pattern, name):
                continue
            widths = told.get("sub_param_shard_widths")
            if isinstance(widths, dict) and pattern in widths:
                return [list(own) for own in widths[pattern]]
            told_sizes, total = entry["shape"][0], sum(shape[0] for shape in shapes)
            sizes = [total // told_sizes] * told_sizes if isinstance(told_sizes, int) else list(told_sizes)
            return [[size // len(shapes)] * len(shapes) for size in sizes]
    return None


def _moved(strip: _Strip, boxes: Boxes, shape: Ints) -> Iterator[RawTensor]:
    _, first, rows, at = strip
    window = Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:])) if shape else Box((), ())
    for stored in boxes:
        met = stored.box.meet(window)
        if met is None:
            continue
        assert isinstance(stored, RawTensor)
        skipped = (met.offset[0] - stored.box.offset[0]) * prod(stored.box.shape[1:]) if shape else 0
        moved = tuple(o - w + a for o, w, a in zip(met.offset, window.offset, at, strict=True))
        yield RawTensor(stored.path, stored.start + skipped * stored.dtype.itemsize, stored.dtype, Box(moved, met.shape))


def _extent(boxes: Boxes) -> Ints:
    ends = [tuple(o + n for o, n in zip(stored.box.offset, stored.box.shape, strict=True)) for stored in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def _rows(shape: Ints) -> int:
    return shape[0] if shape else 1


def _list(told: Mapping[str, object], key: str) -> list:  # type: ignore[type-arg]  # what a pickle holds
    value = told.get(key)
    return value if isinstance(value, list) else []
