"""The files of a DeepSpeed save as the witnesses load them, and what of a save is not in the optimizer's vectors.

Files are loaded by torch's own weights-only loader onto the meta device, with stand-ins for DeepSpeed's few classes.

Source: deepspeed 0.19.8, runtime/engine.py (names of files), utils/zero_to_fp32.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from reports.errors import FormatError
from tasks.witnesses.boxes import Box, Ints, StoredBox, flat_boxes
from tasks.witnesses.torch_items import RawTensor, load_item, locate_values
from tasks.witnesses.zero_joins import join_stages, tp_degree

Stored = Mapping[str, tuple[StoredBox, ...]]
Vector = tuple[torch.Tensor, Path]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")


class _Kept:
    # Stand-in for DeepSpeed's classes, and for what trainers add as client state: keeps what it is given.
    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "argparse.Namespace",
    "builtins.set",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
)
_STAND_INS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (type(name.rpartition(".")[2], (_Kept,), {}), name) for name in _NAMES
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a file holds, tensors without their values."""

    path: Path
    held: Mapping[str, object]

    def mapping(self, key: str) -> Mapping[str, object]:
        """Return a key's mapping; empty where the file has none.

        Args:
            key: of the file's top level.

        Returns:
            The mapping.
        """
        value = self.held.get(key)
        return value if isinstance(value, dict) else {}

    def items(self, key: str) -> list[object]:
        """Return a key's list; empty where the file has none.

        Args:
            key: of the file's top level.

        Returns:
            The list.
        """
        value = self.held.get(key)
        return value if isinstance(value, list) else [value] if isinstance(value, dict) else []

    @property
    def groups(self) -> list[dict[str, Ints]]:
        """Shapes by parameter of each flat group, in the vector's order."""
        return [
            {name: tuple(torch.Size(shape)) for name, shape in group.items()}
            for group in self.items("param_shapes")
            if isinstance(group, dict)
        ]

    def vector(self, key: str, number: int) -> Vector:
        """Return one vector of a list.

        Args:
            key: of the file's top level.
            number: which group's.

        Returns:
            The vector and its file.

        Raises:
            FormatError: there is no such vector.
        """
        vectors = self.items(key)
        found = vectors[number] if number < len(vectors) else None
        if not isinstance(found, torch.Tensor):
            raise FormatError(f"{key}[{number}] is no tensor", where=str(self.path))
        return found, self.path


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a parameter are those from `at` of a vector."""

    vector: Vector
    at: int
    start: int
    stop: int


def safe_classes() -> AbstractContextManager[None]:
    """Let torch's weights-only loader take DeepSpeed's classes, as stand-ins.

    Returns:
        A context in which it does.
    """
    return torch.serialization.safe_globals(_STAND_INS)


def find_saved(roots: tuple[Path, ...]) -> dict[str, Path]:
    """Return a save's files by name.

    Args:
        roots: its folder, and the other nodes' roots.

    Returns:
        Name → path.
    """
    tag = roots[0].name
    folders = (roots[0], *(folder for root in roots[1:] for folder in (root, root / tag, root / "pytorch_model" / tag)))
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.pt")):
            found.setdefault(path.name, path)
    return found


def load_models(files: Mapping[str, Path]) -> dict[int, list[Loaded]]:
    """Return the model states: by mp rank, those of its data-parallel ranks.

    Args:
        files: by name.

    Returns:
        Files, each list by number.

    Raises:
        FormatError: torch refuses one.
    """
    stages: dict[int, dict[int, Loaded]] = {}
    for (dp, mp), path in _matching(files, _MODEL):
        stages.setdefault(int(mp), {})[int(dp or 0)] = _load(path)
    return {mp: [ranks[dp] for dp in sorted(ranks)] for mp, ranks in sorted(stages.items())}


def load_optims(files: Mapping[str, Path], stage: int) -> list[Loaded]:
    """Return the optimizer files of one mp rank.

    Args:
        files: by name.
        stage: the mp rank.

    Returns:
        What they hold of the optimizer, by rank.

    Raises:
        FormatError: torch refuses one.
    """
    ranks = {int(dp): path for (dp, mp), path in _matching(files, _OPTIM) if int(mp) == stage}
    return [Loaded(path, _load(path).mapping("optimizer_state_dict")) for _, path in sorted(ranks.items())]


def frozen_weights(ranks: list[Loaded]) -> Iterator[tuple[str, tuple[StoredBox, ...]]]:
    """Yield what the model states hold of frozen parameters: whole, or in the ranks' pieces.

    Args:
        ranks: model states of all ranks that wrote one.

    Yields:
        Name, boxes.
    """
    for name, shape in ranks[0].mapping("frozen_param_shapes").items():
        full = tuple(torch.Size(shape))  # type: ignore[arg-type]  # a torch.Size
        pieces = [(rank.mapping("frozen_param_fragments").get(name), rank.path) for rank in ranks]
        vectors = [(piece.reshape(-1), path) for piece, path in pieces if isinstance(piece, torch.Tensor)]
        yield name, boxes_of(full, cut_each({name: full}, vectors)[name])


def cut_each(shapes: Mapping[str, Ints], vectors: list[Vector]) -> dict[str, list[Piece]]:
    """Return where parameters lie that are each cut into one equal piece per rank, the last one padded.

    Args:
        shapes: the parameters, in the vectors' order.
        vectors: one per rank.

    Returns:
        Pieces by parameter.
    """
    found: dict[str, list[Piece]] = {}
    at = 0
    for name, shape in shapes.items():
        left, own = prod(shape), []
        size = (left + len(vectors) - 1) // max(len(vectors), 1)
        for vector in vectors:
            take = min(size, left)
            if take:
                own.append(Piece(vector, at, prod(shape) - left, prod(shape) - left + take))
            left -= take
        found[name] = own
        at += size
    return found


def boxes_of(shape: Ints, pieces: list[Piece]) -> tuple[StoredBox, ...]:
    """Return the boxes that pieces of a parameter are.

    Args:
        shape: the parameter's.
        pieces: of it.

    Returns:
        Boxes, each with its place.

    Raises:
        FormatError: a vector is not stored in order.
    """
    made = []
    for piece in pieces:
        tensor, path = piece.vector
        first, itemsize = locate_values(tensor, path), tensor.dtype.itemsize
        for box, begin in flat_boxes(shape, piece.start, piece.stop):
            made.append(RawTensor(path, first + (piece.at + begin - piece.start) * itemsize, tensor.dtype, box))
    return tuple(made)


def decode_copies(roots: tuple[Path, ...]) -> Stored:
    """Return the weights that the model states, layer files and expert files hold, in the precision of training.

    Args:
        roots: the save's folder, and the other nodes' roots.

    Returns:
        Stored boxes by tensor name; placeholders without elements are left out.

    Raises:
        FormatError: damaged.
    """
    files = find_saved(roots)
    models = [ranks[0] for ranks in load_models(files).values()]
    layers: dict[int, dict[str, tuple[StoredBox, ...]]] = {}
    for (layer, rank), path in _matching(files, _LAYER):
        layers.setdefault(int(rank or 0), {}).update(_whole_tensors(_load(path).held, path, f"{int(layer)}."))
    parts = [_whole_tensors(model.mapping("module"), model.path, "") for model in models]
    held = models[0].held if models else {}
    stored: dict[str, tuple[StoredBox, ...]] = {}
    for stage in reversed(join_stages(parts, held, roots, tp_degree(held, len(models)))):
        stored |= stage
    for whole in join_stages(list(layers.values()), held, roots, len(layers)) if layers else ():
        stored |= whole
    for _, path in _matching(files, _EXPERT):
        stored |= _whole_tensors(_load(path).held, path, "")
    return stored


def with_rest(stored: Stored, first: Loaded, roots: tuple[Path, ...]) -> Stored:
    """Add what only the low-precision files hold, and the aliases.

    Args:
        stored: what has been found elsewhere.
        first: the model states of global rank 0.
        roots: the save's folder, and the other nodes' roots.

    Returns:
        All tensors of the save.
    """
    aliases = {**_shared_storages(first.mapping("module"), stored), **first.mapping("shared_params")}
    rest = {name: boxes for name, boxes in decode_copies(roots).items() if name not in {**stored, **aliases}}
    whole = {**stored, **{name: boxes for name, boxes in rest.items() if not _is_tied(name, boxes, stored)}}
    return whole | {alias: whole[str(kept)] for alias, kept in aliases.items() if str(kept) in whole}


def _matching(files: Mapping[str, Path], pattern: re.Pattern[str]) -> list[tuple[tuple[str, ...], Path]]:
    matches = [(pattern.fullmatch(name), path) for name, path in sorted(files.items())]
    return [(tuple(part or "" for part in match.groups()), path) for match, path in matches if match]


def _load(path: Path) -> Loaded:
    with path.open("rb", buffering=0) as file, safe_classes():
        held = load_item(file.fileno(), path, 0, path.stat().st_size, map_location="meta")
    if not isinstance(held, dict):
        raise FormatError(f"holds a {type(held).__name__}", where=str(path))
    return Loaded(path, held)


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
