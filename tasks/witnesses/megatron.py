"""What Megatron's ranks hold, decoded a second time, for both of its formats.

Of what several ranks hold, the copy of the last one is taken (the engine reads the first). A rank's share is placed by its coordinate, that
of a gated fc1 half by half; whether it is gated, args say (the engine goes by shapes). Global names are the plan's: layers and experts
counted over all ranks.

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
from tasks.witnesses.megatron_ranks import Rank, dist_folders, find_file, load_ranks, single_names, store_whole
from tasks.witnesses.torch_items import RawTensor, load_item, locate_values

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
    ranks = load_ranks(roots)
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for chunk, tensors in enumerate(rank.chunks):
            layers = {int(m[1]) for name in tensors if (m := re.search(r"decoder\.layers\.(\d+)\.", name))}
            counts[chunk, rank.pp] = len(layers)
    starts = {key: sum(counts[before] for before in counts if before < key) for key in counts}
    stored: dict[str, dict[Box, StoredBox]] = {}
    for rank in ranks:
        for chunk, tensors in enumerate(rank.chunks):
            for name, local in single_names(rank, tensors).items():
                for box in _boxes(rank, name, local):
                    stored.setdefault(_global_name(name, starts[chunk, rank.pp], rank), {})[box.box] = box
    return {name: tuple(boxes.values()) for name, boxes in stored.items()}


def _boxes(rank: Rank, name: str, local: torch.Tensor) -> Iterator[StoredBox]:
    tp = rank.size("tensor_model_parallel_size")
    ranks = rank.expert_tp if ".experts." in name else tp
    at = rank.tp % ranks
    dim = _DIM.get(".".join(name.split(".")[-2:]))
    if dim is None or ranks == 1:
        yield store_whole(rank.path, local, (0,) * local.ndim)
    elif name.endswith(("linear_fc1.weight", "linear_fc1.bias")) and (rank.args.get("swiglu") or rank.args.get("quick_geglu")):
        half = local.shape[0] // 2
        for part, rows in enumerate((local[:half], local[half:])):
            yield store_whole(rank.path, rows, (part * half * ranks + at * half, *(0,) * (local.ndim - 1)))
    else:
        yield store_whole(rank.path, local, tuple(at * local.shape[dim] if d == dim else 0 for d in range(local.ndim)))


def _global_name(name: str, first_layer: int, rank: Rank) -> str:
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)
    return re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".local_experts.{int(m[1]) + rank.ep * rank.experts}.", name)


_MASTER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?:param|fp32_param)\.")


def decode_dist_masters(roots: tuple[Path, ...]) -> Mapping[str, tuple[StoredBox, ...]]:
    """Return the optimizer's masters in a torch_dist save, and the model's own tensors that have none.

    Args:
        roots: its folders, the main one first.

    Returns:
        Stored boxes by global name.

    Raises:
        NotHeardError: no `.metadata`, or masters that are stored in fragments or buckets.
        FormatError: damaged.
    """
    folder, _ = dist_folders(roots)
    listed = {tensor.key: tensor.shape for tensor in read_dcp_metadata((folder / ".metadata").read_bytes())}
    masters = {key: _MASTER.sub("", key) for key in listed if _MASTER.match(key)}
    flat = [key for key in listed if ".dp_group_idx_" in key]
    if flat:
        raise NotHeardError(f"{flat[0]} names no parameter", where=str(folder))
    cut = [key for key, name in masters.items() if listed.get(name) != listed[key]]
    if cut:
        raise NotHeardError(f"{cut[0]} does not have its parameter's shape", where=str(folder))
    taken = set(masters.values())
    return _decode_dist(roots, lambda key: masters.get(key, "" if "optimizer." in key or key in taken else key))


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
    return _decode_dist(roots, lambda key: "" if "optimizer." in key else key)


def _decode_dist(roots: tuple[Path, ...], called: Callable[[str], str]) -> dict[str, tuple[StoredBox, ...]]:
    # `called` gives the model's key that an entry holds the values of, "" for none.
    folder, searched = dist_folders(roots)
    stored: dict[str, list[StoredBox]] = {}
    for tensor in read_dcp_metadata((folder / ".metadata").read_bytes()):
        key = called(tensor.key)
        if not key:
            continue  # training state
        name = re.sub(r"^(?:module\.)+", "", key).replace(".experts.experts.", ".experts.local_experts.")
        name = re.sub(r"^decoder\.layers\.(?=\D)", "decoder.layers.{}.", name)
        name = re.sub(r"\.local_experts\.(?=\D)", ".local_experts.{}.", name)
        depth = name.count("{}")
        for place in tensor.places:
            found = find_file(searched, place.path)
            box = Box(place.box.offset[depth:], place.box.shape[depth:])
            leads = [range(a, a + n) for a, n in zip(place.box.offset[:depth], place.box.shape[:depth], strict=True)]
            for lead in product(*leads):
                stored.setdefault(name.format(*lead), []).append(_Layer(found, place, lead, box))
    return {name: tuple(boxes) for name, boxes in stored.items()}
