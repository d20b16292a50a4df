"""What Megatron's ranks hold, decoded a second time, for both of its formats.

Legacy files are loaded by torch's own weights-only loader onto the meta device, with stand-ins for what args name. Of what several ranks
hold, the copy of the last one is taken (the engine reads the first). A rank's share is placed by its coordinate, that of a gated fc1 half
by half; whether it is gated, args say (the engine goes by shapes). Global names are the plan's: layers and experts counted over all ranks.

Source: Megatron-LM core 0.12 to main, megatron/core/transformer and megatron/training/checkpointing.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from reports.errors import FormatError
from tasks.witnesses.boxes import Box, Ints, ReadBox, StoredBox
from tasks.witnesses.dcp_metadata import ItemPlace, read_dcp_metadata
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.torch_items import RawTensor, load_item, locate_values

_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_TRUSTED = frozenset(
    {
        "builtins.getattr",
        "__builtin__.getattr",
        "argparse.Namespace",
        "signal.Signals",
        "numpy.ndarray",
        "numpy.dtype",
        "_io.BytesIO",
        "types.SimpleNamespace",
    }
)
_NUMPY = re.compile(r"numpy\.(?:_core|core)\.multiarray\.(?:_reconstruct|scalar)")
_CLASS = re.compile(r"megatron\.[\w.]*\.[A-Z]\w*")

# Last module and parameter of a name → the dim it is cut on. What is not here is on every rank whole.
_DIM: Mapping[str, int] = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "output_layer.bias": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_q_proj.weight": 0,
    "linear_q_up_proj.weight": 0,
    "linear_kv_up_proj.weight": 0,
    "eh_proj.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}


class _Kept:
    # Stand-in for what args and random states name: keeps what it is given.
    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True, slots=True)
class _Rank:
    path: Path
    tp: int
    pp: int
    ep: int
    args: Mapping[str, object]
    chunks: tuple[Mapping[str, torch.Tensor], ...]

    def size(self, name: str, default: int = 1) -> int:
        value = self.args.get(name)
        return value if isinstance(value, int) else default


@dataclass(frozen=True, slots=True)
class _Turned:
    # A box whose values are stored transposed.
    inner: RawTensor
    box: Box

    @contextmanager
    def open(self) -> Iterator[ReadBox]:
        with self.inner.open() as read:
            yield lambda at, shape: read(at[::-1], shape[::-1]).T


@dataclass(frozen=True, slots=True)
class _Layer:
    # A box of one layer (and expert) inside a torch.save item that holds a chunk of the stacked tensor.
    item: Path
    place: ItemPlace
    lead: Ints
    box: Box

    @contextmanager
    def open(self) -> Iterator[ReadBox]:
        with self.item.open("rb", buffering=0) as file:
            meta = load_item(file.fileno(), self.item, self.place.start, self.place.nbytes, map_location="meta")
        if not isinstance(meta, torch.Tensor) or meta.numel() != self.place.box.numel or not meta.is_contiguous():
            raise FormatError(f"expected a tensor {self.place.box.shape}", where=f"{self.item} at byte {self.place.start}")
        first = self.place.start + locate_values(meta, self.item)
        depth = len(self.lead)
        inside = tuple(a - b for a, b in zip(self.lead, self.place.box.offset[:depth], strict=True))
        with RawTensor(self.item, first, meta.dtype, self.place.box).open() as read:
            yield lambda at, shape: read((*inside, *at), (*(1,) * depth, *shape)).reshape(shape)


def decode_megatron(roots: tuple[Path, ...]) -> Mapping[str, tuple[StoredBox, ...]]:
    """Return what a legacy save holds.

    Args:
        roots: its folders, the main one first.

    Returns:
        Stored boxes by global name.

    Raises:
        NotHeardError: no rank folder, or args that torch's loader refuses.
        FormatError: damaged.
    """
    ranks = _load_ranks(roots)
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for chunk, tensors in enumerate(rank.chunks):
            layers = {int(m[1]) for name in tensors if (m := re.search(r"decoder\.layers\.(\d+)\.", name))}
            counts[chunk, rank.pp] = len(layers)
    starts = {key: sum(counts[before] for before in counts if before < key) for key in counts}
    stored: dict[str, dict[Box, StoredBox]] = {}
    for rank in ranks:
        for chunk, tensors in enumerate(rank.chunks):
            for name, local in _singled(rank, tensors).items():
                for box in _boxes(rank, name, local):
                    stored.setdefault(_global_name(name, starts[chunk, rank.pp], rank), {})[box.box] = box
    return {name: tuple(boxes.values()) for name, boxes in stored.items()}


def _load_ranks(roots: tuple[Path, ...]) -> list[_Rank]:
    found = {path.parent.name: path for root in reversed(roots) for path in root.glob("mp_rank_*/model_optim_rng.pt")}
    if not found:
        found = {path.parent.name: path for path in roots[0].glob("release/mp_rank_*/model_optim_rng.pt")}
    if not found:
        raise NotHeardError("no mp_rank_* folder", where=str(roots[0]))
    ranks = [_load_rank(path) for _, path in sorted(found.items())]
    return sorted(ranks, key=lambda rank: (rank.pp, rank.tp, rank.ep))


def _load_rank(path: Path) -> _Rank:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    strange = [name for name in names if name not in _TRUSTED and not _NUMPY.fullmatch(name) and not _CLASS.fullmatch(name)]
    if strange:
        raise NotHeardError(f"names {strange[0]}, for which this witness has no stand-in", where=str(path))
    stand_ins: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
        (type(name.rpartition(".")[2], (_Kept,), {}), name) for name in names
    ]
    with path.open("rb", buffering=0) as file, torch.serialization.safe_globals(stand_ins):
        held = load_item(file.fileno(), path, 0, path.stat().st_size, map_location="meta")
    args = held.get("args") if isinstance(held, dict) else None
    state = getattr(args, "state", None)
    if not isinstance(held, dict) or not isinstance(state, dict):
        raise NotHeardError("holds no args", where=str(path))
    match = _FOLDER.fullmatch(path.parent.name)
    assert match is not None
    tp, *rest = (int(number) for number in match.groups() if number is not None)
    is_piped = state.get("pipeline_model_parallel_size", 1) > 1
    pp = rest.pop(0) if is_piped and rest else 0
    keys = ["model"] if "model" in held else sorted((key for key in held if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:]))
    chunks = tuple({name: value for name, value in held[key].items() if isinstance(value, torch.Tensor)} for key in keys)
    return _Rank(path, tp, pp, rest[0] if rest else 0, state, chunks)


def _singled(rank: _Rank, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Local names without wrappers, one expert each; views for experts that are stored together.
    made: dict[str, torch.Tensor] = {}
    experts = rank.size("num_experts", 0) // rank.size("expert_model_parallel_size")
    for saved, value in tensors.items():
        name = re.sub(r"^(?:module\.)+", "", saved)
        grouped = re.fullmatch(r"(.*\.experts)\.weight([12])", name)
        if "_extra_state" in name:
            continue  # scales of FP8 matmuls
        if grouped:
            hidden = value.shape[0] if grouped[2] == "1" else value.shape[1]
            view = value.view(experts, hidden, -1) if grouped[2] == "1" else value.view(experts, -1, hidden)
            made |= {f"{grouped[1]}.local_experts.{e}.linear_fc{grouped[2]}.weight": view[e].T for e in range(experts)}
        else:
            made[re.sub(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$", r".experts.local_experts.\2.\1", name)] = value
    return made


def _boxes(rank: _Rank, name: str, local: torch.Tensor) -> Iterator[StoredBox]:
    tp = rank.size("tensor_model_parallel_size")
    ranks = rank.size("expert_tensor_parallel_size", tp) if ".experts." in name else tp
    at = rank.tp % ranks
    dim = _DIM.get(".".join(name.split(".")[-2:]))
    if dim is None or ranks == 1:
        yield _stored(rank.path, local, (0,) * local.ndim)
    elif name.endswith(("linear_fc1.weight", "linear_fc1.bias")) and (rank.args.get("swiglu") or rank.args.get("quick_geglu")):
        half = local.shape[0] // 2
        for part, rows in enumerate((local[:half], local[half:])):
            yield _stored(rank.path, rows, (part * half * ranks + at * half, *(0,) * (local.ndim - 1)))
    else:
        yield _stored(rank.path, local, tuple(at * local.shape[dim] if d == dim else 0 for d in range(local.ndim)))


def _stored(path: Path, values: torch.Tensor, offset: Ints) -> StoredBox:
    box = Box(offset, tuple(values.shape))
    if values.is_contiguous():
        return RawTensor(path, locate_values(values, path), values.dtype, box)
    if values.ndim == 2 and values.stride(0) == 1:  # rows of a transposed matrix: columns of what is stored
        width = values.stride(1)
        start = locate_values(values.as_strided((1,), (1,)), path)
        return _Turned(RawTensor(path, start, values.dtype, Box((0, 0), (values.shape[1], width))), box)
    raise FormatError(f"a tensor of strides {values.stride()} is not stored in C order", where=str(path))


def _global_name(name: str, first_layer: int, rank: _Rank) -> str:
    experts = rank.size("num_experts", 0) // rank.size("expert_model_parallel_size")
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)
    return re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".local_experts.{int(m[1]) + rank.ep * experts}.", name)


def decode_megatron_dist(roots: tuple[Path, ...]) -> Mapping[str, tuple[StoredBox, ...]]:
    """Return what a torch_dist save holds of the model.

    Args:
        roots: its folders, the main one first.

    Returns:
        Stored boxes by global name.

    Raises:
        NotHeardError: no `.metadata`.
        FormatError: damaged.
    """
    folder = next((path for path in (roots[0], roots[0] / "release") if (path / ".metadata").is_file()), None)
    if folder is None:
        raise NotHeardError("no .metadata", where=str(roots[0]))
    searched = (folder, *roots[1:])
    stored: dict[str, list[StoredBox]] = {}
    for tensor in read_dcp_metadata((folder / ".metadata").read_bytes()):
        if "optimizer." in tensor.key:
            continue  # training state
        name = re.sub(r"^(?:module\.)+", "", tensor.key).replace(".experts.experts.", ".experts.local_experts.")
        name = re.sub(r"^decoder\.layers\.(?=\D)", "decoder.layers.{}.", name)
        name = re.sub(r"\.local_experts\.(?=\D)", ".local_experts.{}.", name)
        depth = name.count("{}")
        for place in tensor.places:
            found = next((root / place.path for root in searched if (root / place.path).is_file()), folder / place.path)
            box = Box(place.box.offset[depth:], place.box.shape[depth:])
            leads = [range(a, a + n) for a, n in zip(place.box.offset[:depth], place.box.shape[:depth], strict=True)]
            for lead in product(*leads):
                stored.setdefault(name.format(*lead), []).append(_Layer(found, place, lead, box))
    return {name: tuple(boxes) for name, boxes in stored.items()}
