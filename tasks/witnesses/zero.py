"""What a DeepSpeed save holds, decoded a second time.

Where a rank recorded which parameter lies where in its slice (`param_slice_mappings`, ZeRO-1 and -2), that map is followed, not the order
of `param_shapes`: a parameter is its pieces in the order of ranks. Without the map, for ZeRO-3, and under round_robin_gradients, whose maps
are wrong, the order is walked.

Source: deepspeed 0.19.8, utils/zero_to_fp32.py, utils/tensor_fragment.py, utils/groups.py; checkpoint/ds_to_universal.py.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch

from reports.errors import FormatError
from tasks.witnesses.boxes import Ints, StoredBox
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.torch_items import load_item
from tasks.witnesses.zero_joins import join_stages, tp_degree
from tasks.witnesses.zero_saves import (
    Loaded,
    Piece,
    Stored,
    Vector,
    boxes_of,
    cut_each,
    find_saved,
    frozen_weights,
    load_models,
    load_optims,
    safe_classes,
    with_rest,
)

_LOCAL_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


def decode_zero(roots: tuple[Path, ...]) -> Stored:
    """Return what a save holds: masters, and what no optimizer holds.

    Args:
        roots: the save's folder, and the other nodes' roots.

    Returns:
        Stored boxes by tensor name.

    Raises:
        NotHeardError: nothing that this reading understands.
        FormatError: damaged.
    """
    files = find_saved(roots)
    stages = load_models(files)
    if not stages:
        raise NotHeardError("no DeepSpeed model states", where=str(roots[0]))
    first = next(iter(stages.values()))[0]
    parts = []
    for mp, ranks in stages.items():
        own = {name: boxes_of(shape, pieces) for name, (shape, pieces) in _masters(ranks[0], load_optims(files, mp)).items()}
        parts.append(own | {name: boxes for name, boxes in frozen_weights(ranks) if name not in own})
    stored: dict[str, tuple[StoredBox, ...]] = {}
    for stage in join_stages(parts, first.held, roots, tp_degree(first.held, len(stages))):
        stored = {**stage, **stored}
    return with_rest(stored, first, roots)


def decode_universal(roots: tuple[Path, ...]) -> Stored:
    """Return what a universal checkpoint holds: one file per parameter, buffers and the rest in the model states.

    Args:
        roots: its folder.

    Returns:
        Stored boxes by tensor name.

    Raises:
        NotHeardError: no parameter folders or model states.
        FormatError: damaged.
    """
    folders = sorted(path.parent for path in (roots[0] / "zero").glob("*/fp32.pt"))
    stages = load_models(find_saved(roots))
    if not folders or not stages:
        raise NotHeardError("no folder per parameter, or no model states", where=str(roots[0]))
    first = next(iter(stages.values()))[0]
    shapes = {name: shape for ranks in stages.values() for group in ranks[0].groups for name, shape in group.items()}
    buffers = {str(name) for name in first.items("buffer_names")}
    stored = {folder.name: _parameter(folder, shapes) for folder in folders if folder.name not in buffers}
    for ranks in stages.values():
        stored |= {name: boxes for name, boxes in frozen_weights(ranks) if name not in stored}
    return with_rest(stored, first, roots)


def _parameter(folder: Path, shapes: Mapping[str, Ints]) -> tuple[StoredBox, ...]:
    path = folder / "fp32.pt"
    with path.open("rb", buffering=0) as file, safe_classes():
        held = load_item(file.fileno(), path, 0, path.stat().st_size, map_location="meta")
    values = held.get("param") if isinstance(held, dict) else held
    if not isinstance(values, torch.Tensor):
        raise FormatError("holds no tensor", where=str(path))
    shape = tuple(values.shape) if isinstance(held, dict) else shapes.get(folder.name, tuple(values.shape))
    return boxes_of(shape, [Piece((values, path), 0, 0, prod(shape))])


def _masters(model: Loaded, optims: list[Loaded]) -> dict[str, tuple[Ints, list[Piece]]]:
    found: dict[str, tuple[Ints, list[Piece]]] = {}
    for number, shapes in enumerate(model.groups if optims else ()):
        if "fp32_flat_groups" in optims[0].held:
            pieces = cut_each(shapes, [rank.vector("fp32_flat_groups", number) for rank in optims])
            found |= {name: (shapes[name], own) for name, own in pieces.items()}
            continue
        degree = _expert_degree(optims, number)
        for expert_rank in range(degree):
            for name, own in _cut_slices(shapes, optims[expert_rank::degree], number, by_map=not _is_round_robin(model)).items():
                found[name if degree == 1 else _global_name(name, expert_rank, shapes)] = (shapes[name], own)
    return found


def _expert_degree(optims: list[Loaded], number: int) -> int:
    # How many ranks hold other experts in this group; 1 for a dense one.
    counts = optims[0].held.get("partition_count")
    sharing = counts[number] if isinstance(counts, list) else counts or len(optims)
    if not isinstance(sharing, int) or sharing < 1 or len(optims) % sharing:
        raise FormatError(f"partition_count {counts} of {len(optims)} ranks", where=str(optims[0].path))
    return len(optims) // sharing


def _is_round_robin(model: Loaded) -> bool:
    # DeepSpeed reorders the groups then, and writes maps of the order before.
    zero = model.mapping("ds_config").get("zero_optimization")
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _cut_slices(shapes: Mapping[str, Ints], ranks: list[Loaded], number: int, *, by_map: bool) -> dict[str, list[Piece]]:
    # ZeRO-1 and -2: by the ranks' own maps where there are any, else one parameter behind the other.
    vectors = [rank.vector("single_partition_of_fp32_groups", number) for rank in ranks]
    maps = [rank.items("param_slice_mappings") for rank in ranks]
    if not by_map or any(number >= len(own) for own in maps):
        gaps = ranks[0].items("param_alignment_paddings")
        return _follow(shapes, gaps[number] if number < len(gaps) else [0] * len(shapes), vectors)
    found: dict[str, list[Piece]] = {name: [] for name in shapes}
    for vector, own in zip(vectors, maps, strict=True):
        addresses = own[number]
        assert isinstance(addresses, dict)
        for name, address in addresses.items():
            done = found[name][-1].stop if found[name] else 0
            found[name] += [Piece(vector, address.start, done, done + address.numel)] if address.numel else []
    return found


def _follow(shapes: Mapping[str, Ints], gaps: object, vectors: list[Vector]) -> dict[str, list[Piece]]:
    # One parameter behind the other, over the ends of vectors.
    assert isinstance(gaps, list)
    ends = np.cumsum([0, *(vector.numel() for vector, _ in vectors)]).tolist()
    found: dict[str, list[Piece]] = {}
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        own = []
        for vector, low, high in zip(vectors, ends, ends[1:], strict=False):
            first, last = max(at, low), min(at + prod(shape), high)
            if first < last:
                own.append(Piece(vector, first - low, first - at, last - at))
        found[name] = own
        at += prod(shape) + gap
    return found


def _global_name(name: str, expert_rank: int, shapes: Mapping[str, Ints]) -> str:
    match = _LOCAL_EXPERT.fullmatch(name)
    if match is None:
        return name
    here = {other[2] for text in shapes if (other := _LOCAL_EXPERT.fullmatch(text)) and other[1] == match[1]}
    return f"{match[1]}{expert_rank * len(here) + int(match[2])}{match[3]}"
