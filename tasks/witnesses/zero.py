"""What a DeepSpeed save holds, decoded a second time, and the low-precision copies it holds beside the masters.

Files are loaded by torch's own weights-only loader onto the meta device, with stand-ins for DeepSpeed's few classes. Where a rank recorded
which parameter lies where in its slice (`param_slice_mappings`, ZeRO-1 and -2), that map is followed, not the order of `param_shapes`: a
parameter is its pieces in the order of ranks. Without the map, and for ZeRO-3, the order is walked.

Source: deepspeed 0.19.8, utils/zero_to_fp32.py, utils/tensor_fragment.py, utils/groups.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from reports.errors import FormatError
from tasks.witnesses.boxes import Box, Ints, StoredBox, flat_boxes
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.torch_items import RawTensor, load_item, locate_values

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")
_LOCAL_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


class _Kept:
    # Stand-in for DeepSpeed's classes: keeps what it is given.
    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "argparse.Namespace",
)
_STAND_INS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (type(name.rpartition(".")[2], (_Kept,), {}), name) for name in _NAMES
]


@dataclass(frozen=True, slots=True)
class _Piece:
    # Elements [start, stop) of a parameter are those from `at` of a vector.
    vector: torch.Tensor
    path: Path
    at: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    path: Path
    held: Mapping[str, object]


Stored = Mapping[str, tuple[StoredBox, ...]]


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
    files = _find(roots)
    stages = _models(files)
    if not stages:
        raise NotHeardError("no DeepSpeed model states", where=str(roots[0]))
    stored: dict[str, tuple[StoredBox, ...]] = {}
    for mp, ranks in stages.items():
        for name, (shape, pieces) in _masters(ranks[0], _optims(files, mp)).items():
            stored.setdefault(name, tuple(_boxes(shape, pieces)))
        stored |= {name: boxes for name, boxes in _frozen(ranks) if name not in stored}
    first = next(iter(stages.values()))[0]
    aliases = {**_shared_storages(_mapping(first.held.get("module")), stored), **_mapping(first.held.get("shared_params"))}
    copies = decode_copies(roots)
    stored |= {name: boxes for name, boxes in copies.items() if name not in {**stored, **aliases} and not _is_tied(name, boxes, stored)}
    return stored | {str(alias): stored[str(kept)] for alias, kept in aliases.items() if str(kept) in stored}


def decode_copies(roots: tuple[Path, ...]) -> Stored:
    """Return the weights that the model states, layer files and expert files hold, in the precision of training.

    Args:
        roots: the save's folder, and the other nodes' roots.

    Returns:
        Stored boxes by tensor name; placeholders without elements are left out.

    Raises:
        FormatError: damaged.
    """
    files = _find(roots)
    stored: dict[str, tuple[StoredBox, ...]] = {}
    for _, path in sorted(_matching(files, _MODEL).items(), reverse=True):  # the first rank's last, so that they count
        stored |= _whole_tensors(_mapping(_load(path).held.get("module")), path, "")
    for (layer, *_), path in _matching(files, _LAYER).items():
        stored |= _whole_tensors(_load(path).held, path, f"{int(layer)}.")
    for path in _matching(files, _EXPERT).values():
        stored |= _whole_tensors(_load(path).held, path, "")
    return stored


def _find(roots: tuple[Path, ...]) -> dict[str, Path]:
    tag = roots[0].name
    folders = (roots[0], *(folder for root in roots[1:] for folder in (root, root / tag, root / "pytorch_model" / tag)))
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.pt")):
            found.setdefault(path.name, path)
    return found


def _matching(files: Mapping[str, Path], pattern: re.Pattern[str]) -> dict[tuple[str, ...], Path]:
    return {
        tuple(part or "" for part in (*match.groups(), name)): path for name, path in files.items() if (match := pattern.fullmatch(name))
    }


def _load(path: Path) -> _Loaded:
    with path.open("rb", buffering=0) as file, torch.serialization.safe_globals(_STAND_INS):
        held = load_item(file.fileno(), path, 0, path.stat().st_size, map_location="meta")
    if not isinstance(held, dict):
        raise FormatError(f"holds a {type(held).__name__}", where=str(path))
    return _Loaded(path, held)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _models(files: Mapping[str, Path]) -> dict[int, list[_Loaded]]:
    # mp rank → its data-parallel ranks' model states, by number.
    stages: dict[int, dict[int, _Loaded]] = {}
    for (dp, mp, *_), path in _matching(files, _MODEL).items():
        stages.setdefault(int(mp), {})[int(dp or 0)] = _load(path)
    return {mp: [ranks[dp] for dp in sorted(ranks)] for mp, ranks in sorted(stages.items())}


def _shared_storages(module: Mapping[str, object], masters: Mapping[str, object]) -> dict[str, object]:
    # Before DeepSpeed recorded aliases, only their storage told: torch.save writes it once.
    places: dict[tuple[int | None, int, Ints], str] = {}
    aliases: dict[str, object] = {}
    tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor) and value.numel()}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0] not in masters):
        place = (tensor.untyped_storage()._checkpoint_offset, int(tensor.storage_offset()), tuple(tensor.shape))
        if name in masters:
            places[place] = name
        elif place in places:
            aliases[name] = places[place]
    return aliases


def _optims(files: Mapping[str, Path], stage: int) -> list[_Loaded]:
    ranks = {int(dp): path for (dp, mp, *_), path in _matching(files, _OPTIM).items() if int(mp) == stage}
    return [_Loaded(path, _mapping(_load(path).held.get("optimizer_state_dict"))) for _, path in sorted(ranks.items())]


def _masters(model: _Loaded, optims: list[_Loaded]) -> dict[str, tuple[Ints, list[_Piece]]]:
    listed = model.held.get("param_shapes")
    groups = [_mapping(group) for group in (listed if isinstance(listed, list) else [listed] if listed else [])]
    found: dict[str, tuple[Ints, list[_Piece]]] = {}
    for number, group in enumerate(groups if optims else ()):
        shapes = {str(name): tuple(torch.Size(shape)) for name, shape in group.items()}  # type: ignore[arg-type]  # torch.Size or a list
        if "fp32_flat_groups" in optims[0].held:
            pieces = _cut_each(shapes, [_vector(rank, "fp32_flat_groups", number) for rank in optims])
            found |= {name: (shapes[name], own) for name, own in pieces.items()}
            continue
        counts = optims[0].held.get("partition_count")
        sharing = counts[number] if isinstance(counts, list) else counts or len(optims)
        if not isinstance(sharing, int) or sharing < 1 or len(optims) % sharing:
            raise FormatError(f"partition_count {counts} of {len(optims)} ranks", where=str(optims[0].path))
        degree = len(optims) // sharing
        for expert_rank in range(degree):
            ranks = optims[expert_rank::degree]
            pieces = _cut_slices(shapes, ranks, number)
            for name, own in pieces.items():
                found[name if degree == 1 else _global_name(name, expert_rank, shapes)] = (shapes[name], own)
    return found


def _vector(rank: _Loaded, key: str, number: int) -> tuple[torch.Tensor, Path]:
    vector = _list(rank.held.get(key))[number]
    if not isinstance(vector, torch.Tensor):
        raise FormatError(f"{key}[{number}] is no tensor", where=str(rank.path))
    return vector, rank.path


def _cut_each(shapes: Mapping[str, Ints], vectors: list[tuple[torch.Tensor, Path]]) -> dict[str, list[_Piece]]:
    # ZeRO-3: every parameter is cut into equal pieces, the last one padded.
    found: dict[str, list[_Piece]] = {}
    at = 0
    for name, shape in shapes.items():
        left, own = prod(shape), []
        size = (left + len(vectors) - 1) // len(vectors)
        for vector, path in vectors:
            take = min(size, left)
            if take:
                own.append(_Piece(vector, path, at, prod(shape) - left, prod(shape) - left + take))
            left -= take
        found[name] = own
        at += size
    return found


def _cut_slices(shapes: Mapping[str, Ints], ranks: list[_Loaded], number: int) -> dict[str, list[_Piece]]:
    # ZeRO-1 and -2: by the ranks' own maps where there are any, else one parameter behind the other.
    slices = [_list(rank.held.get("param_slice_mappings")) for rank in ranks]
    vectors = [_vector(rank, "single_partition_of_fp32_groups", number) for rank in ranks]
    if all(number < len(maps) for maps in slices):
        found: dict[str, list[_Piece]] = {name: [] for name in shapes}
        for (vector, path), maps in zip(vectors, slices, strict=True):
            for name, address in _mapping(maps[number]).items():
                numel, at = int(address.numel), int(address.start)  # type: ignore[attr-defined]  # a stand-in
                done = found[name][-1].stop if found[name] else 0
                found[name] += [_Piece(vector, path, at, done, done + numel)] if numel else []
        return found
    gaps = _list(ranks[0].held.get("param_alignment_paddings"))
    behind = [int(gap) for gap in _list(gaps[number])] if number < len(gaps) else [0] * len(shapes)  # type: ignore[call-overload]
    return _follow(shapes, behind, vectors)


def _follow(shapes: Mapping[str, Ints], gaps: list[int], vectors: list[tuple[torch.Tensor, Path]]) -> dict[str, list[_Piece]]:
    # One parameter behind the other, over the ends of vectors.
    ends = np.cumsum([0, *(vector.numel() for vector, _ in vectors)]).tolist()
    found: dict[str, list[_Piece]] = {}
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        own = []
        for (vector, path), low, high in zip(vectors, ends, ends[1:], strict=False):
            first, last = max(at, low), min(at + prod(shape), high)
            if first < last:
                own.append(_Piece(vector, path, first - low, first - at, last - at))
        found[name] = own
        at += prod(shape) + gap
    return found


def _global_name(name: str, expert_rank: int, shapes: Mapping[str, Ints]) -> str:
    match = _LOCAL_EXPERT.fullmatch(name)
    if match is None:
        return name
    here = {other[2] for text in shapes if (other := _LOCAL_EXPERT.fullmatch(text)) and other[1] == match[1]}
    return f"{match[1]}{expert_rank * len(here) + int(match[2])}{match[3]}"


def _frozen(ranks: list[_Loaded]) -> Iterator[tuple[str, tuple[StoredBox, ...]]]:
    for name, shape in _mapping(ranks[0].held.get("frozen_param_shapes")).items():
        full = tuple(torch.Size(shape))  # type: ignore[arg-type]  # torch.Size
        own = [(_mapping(rank.held.get("frozen_param_fragments")).get(name), rank.path) for rank in ranks]
        vectors = [(piece.reshape(-1), path) for piece, path in own if isinstance(piece, torch.Tensor)]
        yield name, tuple(_boxes(full, _cut_each({name: full}, vectors)[name]))


def _boxes(shape: Ints, pieces: list[_Piece]) -> Iterator[StoredBox]:
    for piece in pieces:
        first = locate_values(piece.vector, piece.path)
        for box, begin in flat_boxes(shape, piece.start, piece.stop):
            at = first + (piece.at + begin - piece.start) * piece.vector.dtype.itemsize
            yield RawTensor(piece.path, at, piece.vector.dtype, box)


def _whole_tensors(held: Mapping[str, object], path: Path, prefix: str) -> Stored:
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor) and value.numel()}
    return {
        prefix + name: (RawTensor(path, locate_values(tensor, path), tensor.dtype, Box((0,) * tensor.ndim, tuple(tensor.shape))),)
        for name, tensor in tensors.items()
    }


def _is_tied(name: str, boxes: tuple[StoredBox, ...], stored: Stored) -> bool:
    # A pipeline's layer file calls a tied module's weight by the layer's number.
    rest = name.partition(".")[2]
    kept = [own for known, own in stored.items() if known.startswith("tied_modules.") and known.split(".", 2)[2:] == [rest]]
    return any(sum(box.box.numel for box in own) == boxes[0].box.numel for own in kept)
