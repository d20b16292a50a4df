"""Megatron's rank files and run arguments, loaded a second time: by torch's own weights-only loader, onto the meta device.

What args and random states name is replaced by stand-ins that keep what they are given. Names are the rank's own, without wrappers, each
expert by itself.

Source: Megatron-LM core 0.12 to main, megatron/training/checkpointing.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch

from reports.errors import FormatError
from tasks.witnesses.boxes import Box, Ints, ReadBox, StoredBox
from tasks.witnesses.dcp_metadata import find_dcp_objects
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.torch_items import RawTensor, Window, load_item, locate_values

Args = Mapping[str, object]
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
_COMMON, _COMMON_ENTRY = "common.pt", "common_state/"
# Argument → what it was called before, or is called by other versions.
_ALIASES: Mapping[str, str] = {
    "tensor_model_parallel_size": "model_parallel_size",
    "num_experts": "num_moe_experts",
    "num_layers": "encoder_num_layers",
    "layernorm_epsilon": "norm_epsilon",
}


class _Kept:
    # Stand-in for what args and random states name: keeps what it is given.
    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's file. `chunks` are its parts of the model, one per virtual pipeline stage, tensors on the meta device by saved name."""

    path: Path
    tp: int
    pp: int
    ep: int
    args: Args
    chunks: tuple[Mapping[str, torch.Tensor], ...]

    def size(self, name: str, default: int = 1) -> int:
        """Return a count that args state.

        Args:
            name: an argument, as newer versions call it.
            default: where it is absent, None or no number.

        Returns:
            The count.
        """
        value = argument(self.args, name)
        return value if isinstance(value, int) else default

    @property
    def experts(self) -> int:
        """How many experts of a layer this rank holds."""
        return self.size("num_experts", 0) // self.size("expert_model_parallel_size")

    @property
    def expert_tp(self) -> int:
        """How many ranks share an expert."""
        return self.size("expert_tensor_parallel_size", self.size("tensor_model_parallel_size"))


@dataclass(frozen=True, slots=True)
class _Turned:
    # A box whose values are stored transposed.
    inner: RawTensor
    box: Box

    @contextmanager
    def open(self) -> Iterator[ReadBox]:
        with self.inner.open() as read:
            yield lambda at, shape: read(at[::-1], shape[::-1]).T


def argument(args: Args, name: str) -> object:
    """Return an argument of a run under any name it had.

    Args:
        args: the run's.
        name: as newer versions call it.

    Returns:
        Its value; None where it is absent.
    """
    value = args.get(name)
    return args.get(_ALIASES[name]) if value is None and name in _ALIASES else value


def load_ranks(roots: tuple[Path, ...]) -> list[Rank]:
    """Return the rank files of a legacy save, by pipeline stage, then tensor-parallel, then expert-parallel rank.

    Args:
        roots: the save's folders, the main one first.

    Returns:
        The ranks.

    Raises:
        NotHeardError: no rank folder, no args, or names for which there is no stand-in.
        FormatError: damaged.
    """
    found = {path.parent.name: path for root in reversed(roots) for path in root.glob("mp_rank_*/model_optim_rng.pt")}
    if not found:
        found = {path.parent.name: path for path in roots[0].glob("release/mp_rank_*/model_optim_rng.pt")}
    if not found:
        raise NotHeardError("no mp_rank_* folder", where=str(roots[0]))
    ranks = [_load_rank(path) for _, path in sorted(found.items())]
    return sorted(ranks, key=lambda rank: (rank.pp, rank.tp, rank.ep))


def _load_rank(path: Path) -> Rank:
    held = _load(path, 0, path.stat().st_size)
    args = _args_of(held)
    if not isinstance(held, dict) or args is None:
        raise NotHeardError("holds no args", where=str(path))
    match = _FOLDER.fullmatch(path.parent.name)
    assert match is not None
    tp, *rest = (int(number) for number in match.groups() if number is not None)
    piped = args.get("pipeline_model_parallel_size")
    pp = rest.pop(0) if isinstance(piped, int) and piped > 1 and rest else 0
    keys = ["model"] if "model" in held else sorted((key for key in held if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:]))
    chunks = tuple({name: value for name, value in held[key].items() if isinstance(value, torch.Tensor)} for key in keys)
    return Rank(path, tp, pp, rest[0] if rest else 0, args, chunks)


def _load(path: Path, start: int, nbytes: int) -> object:
    # A torch.save file inside another one, tensors on the meta device.
    with path.open("rb", buffering=0) as file:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(cast("IO[bytes]", Window(file.fileno(), start, nbytes)))
        strange = [name for name in names if name not in _TRUSTED and not _NUMPY.fullmatch(name) and not _CLASS.fullmatch(name)]
        if strange:
            raise NotHeardError(f"names {strange[0]}, for which this witness has no stand-in", where=str(path))
        stand_ins: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
            (type(name.rpartition(".")[2], (_Kept,), {}), name) for name in names
        ]
        with torch.serialization.safe_globals(stand_ins):
            return load_item(file.fileno(), path, start, nbytes, map_location="meta")


def _args_of(held: object) -> Args | None:
    state = getattr(held.get("args"), "state", None) if isinstance(held, dict) else None
    return state if isinstance(state, dict) else None


def load_common_args(roots: tuple[Path, ...]) -> Args:
    """Return the run arguments of a torch_dist save.

    Args:
        roots: the save's folders, the main one first.

    Returns:
        Values by name.

    Raises:
        NotHeardError: the save has none, or they name what there is no stand-in for.
        FormatError: damaged.
    """
    folder, searched = dist_folders(roots)
    common = next((root / _COMMON for root in searched if (root / _COMMON).is_file()), None)
    if common is not None:
        held = _load(common, 0, common.stat().st_size)
    else:
        objects = find_dcp_objects((folder / ".metadata").read_bytes())
        place = next((place for key, place in objects.items() if key.startswith(_COMMON_ENTRY)), None)
        if place is None:
            raise NotHeardError(f"neither {_COMMON} nor an entry {_COMMON_ENTRY}", where=str(folder))
        held = _load(find_file(searched, place.path), place.start, place.nbytes)
        held = held[0] if isinstance(held, list) and held else held
    args = _args_of(held)
    if args is None:
        raise NotHeardError("holds no args", where=str(common or folder))
    return args


def dist_folders(roots: tuple[Path, ...]) -> tuple[Path, tuple[Path, ...]]:
    """Return the folder of a torch_dist save that has its `.metadata`, and all that are searched for its files.

    Args:
        roots: the save's folders, the main one first.

    Returns:
        The folder, and the folders, that one first.

    Raises:
        NotHeardError: no `.metadata`.
    """
    folder = next((path for path in (roots[0], roots[0] / "release") if (path / ".metadata").is_file()), None)
    if folder is None:
        raise NotHeardError("no .metadata", where=str(roots[0]))
    return folder, (folder, *roots[1:])


def find_file(folders: tuple[Path, ...], name: str) -> Path:
    """Return where a file of a save is.

    Args:
        folders: searched in this order.
        name: relative to them.

    Returns:
        The first that exists; the first of all where none does.
    """
    return next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)


def single_names(rank: Rank, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a chunk's tensors under local names without wrappers, one expert each.

    Args:
        rank: whose they are.
        tensors: as saved.

    Returns:
        Tensors by name, without extra states; views for experts that are stored together.
    """
    made: dict[str, torch.Tensor] = {}
    experts = rank.experts
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


def store_whole(path: Path, values: torch.Tensor, offset: Ints) -> StoredBox:
    """Return the box of a rank's tensor, to be read from its file.

    Args:
        path: the file.
        values: a tensor of it, on the meta device.
        offset: where its first element lies in the whole.

    Returns:
        The box.

    Raises:
        FormatError: it is stored neither row by row nor column by column.
    """
    box = Box(offset, tuple(values.shape))
    if values.is_contiguous():
        return RawTensor(path, locate_values(values, path), values.dtype, box)
    if values.ndim == 2 and values.stride(0) == 1:  # rows of a transposed matrix: columns of what is stored
        width = values.stride(1)
        start = locate_values(values.as_strided((1,), (1,)), path)
        return _Turned(RawTensor(path, start, values.dtype, Box((0, 0), (values.shape[1], width))), box)
    raise FormatError(f"a tensor of strides {values.stride()} is not stored in C order", where=str(path))
