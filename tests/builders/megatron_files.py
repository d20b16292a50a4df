"""What a rank's file holds, loaded by torch itself; nothing of the product's readers is used."""

import pickle
import types
from pathlib import Path

import torch

from tests.builders.megatron import Tensors


class _Stub:
    # A class of Megatron's, which is not installed here.
    def __init__(self, *args: object) -> None:
        self.args = args


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        return _Stub if module.startswith("megatron.") else super().find_class(module, name)


_PICKLE = types.ModuleType("pickle_without_megatron")
_PICKLE.Unpickler, _PICKLE.load, _PICKLE.__dict__["UnpicklingError"] = _Unpickler, pickle.load, pickle.UnpicklingError  # type: ignore[attr-defined]


def load_rank(folder: Path) -> dict[str, object]:
    """Everything in a rank's file."""
    held = torch.load(folder / "model_optim_rng.pt", weights_only=False, pickle_module=_PICKLE)
    assert isinstance(held, dict)
    return held


def chunks_of(folder: Path) -> dict[str, dict[str, object]]:
    """The parts of the model in a rank's file, by key."""
    return {key: dict(value) for key, value in load_rank(folder).items() if key.startswith("model")}


def differences(ours: Path, theirs: Path, vocab: int) -> list[str]:
    """Where two saves differ in folders, keys, shapes or bits; rows that pad the vocabulary may hold anything."""
    folders = [{path.name for path in save.glob("mp_rank_*")} for save in (ours, theirs)]
    found = [f"folders {sorted(folders[0] ^ folders[1])}"] if folders[0] != folders[1] else []
    for name in sorted(folders[0] & folders[1]):
        first, second = chunks_of(ours / name), chunks_of(theirs / name)
        tp = int(name.split("_")[2])
        found += [f"{name}: chunks {sorted(first.keys() ^ second.keys())}"] if first.keys() != second.keys() else []
        for key in sorted(first.keys() & second.keys()):
            found += [f"{name} {key}: {what}" for what in _of_chunks(first[key], second[key], tp, vocab)]
    return found


def _of_chunks(ours: dict[str, object], theirs: dict[str, object], tp: int, vocab: int) -> list[str]:
    found = [f"keys {sorted(ours.keys() ^ theirs.keys())[:4]}"] if ours.keys() != theirs.keys() else []
    for name in sorted(ours.keys() & theirs.keys()):
        first, second = ours[name], theirs[name]
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            found += [] if first is second is None else [f"{name}: {type(first)} and {type(second)}"]
        elif (first.shape, first.dtype) != (second.shape, second.dtype):
            found.append(f"{name}: {tuple(first.shape)} {first.dtype} and {tuple(second.shape)} {second.dtype}")
        else:
            rows = max(0, vocab - tp * len(first)) if name.endswith(("word_embeddings.weight", "output_layer.weight")) else len(first)
            if not same_bits({name: first[:rows]}, {name: second[:rows]}):
                found.append(f"{name}: other values")
    return found


def same_bits(ours: Tensors, theirs: Tensors) -> bool:
    """Whether two sets of tensors are the same, NaN included."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(value.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)) for name, value in ours.items()
    )
