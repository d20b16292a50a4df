"""DeepSpeed saves of the sound releases' weights, and releases as a wrong reader would take them from such a save."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.builders.editing import Tensors, edit_tensors
from tests.builders.zero import Zero, flat_vector, pieces_of, slice_of

FROZEN = "model.norm.weight"
# name → (model of tests.builders.releases, layout)
SAVES: dict[str, tuple[str, dict[str, object]]] = {
    "zero2": ("dense", {"stage": 2, "world": 2, "maps": False}),
    "zero3": ("dense", {"stage": 3, "world": 3, "dtype": torch.float32}),
    "zero2_tied": ("tied", {"stage": 2, "world": 3, "aliases": {"lm_head.weight": "model.embed_tokens.weight"}}),
}


def save_of(name: str, folder: Path) -> Zero:
    """The save `name` of SAVES of the weights in a release folder; ZeRO-3's last norm is frozen."""
    layout = SAVES[name][1]
    weights = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    frozen = {FROZEN: weights.pop(FROZEN)} if layout["stage"] == 3 else {}
    return Zero(weights, frozen=frozen, **layout)  # type: ignore[arg-type]  # fields of Zero


def misread_slices(change: Callable[[list[torch.Tensor]], list[torch.Tensor]], *, order: Callable[[list[str]], list[str]] = list):
    """Return a planter of what a reader makes of the zero2 save that changes the ranks' slices, or the order of parameters."""

    def plant(folder: Path) -> None:
        save = save_of("zero2", folder)
        (group,) = save.order
        flat = flat_vector(save, group, None)
        joined = torch.cat(change([slice_of(flat, rank, save.world) for rank in range(save.world)]))
        edit_tensors(folder, lambda held: _walk(held, order(group), joined))

    return plant


def misread_pieces(folder: Path) -> None:
    """Plant what a reader makes of the zero3 save that takes no padding into account."""
    save = save_of("zero3", folder)
    vectors = [torch.cat([pieces_of(save.masters[name], save.world)[rank] for name in save.masters]) for rank in range(save.world)]

    def change(held: Tensors) -> None:
        at = 0
        for name, master in save.masters.items():
            part = master.numel() // save.world
            pieces = [vector[at : at + part] for vector in vectors[:-1]]
            rest = master.numel() - part * (save.world - 1)
            held[name] = torch.cat([*pieces, vectors[-1][at : at + rest]]).reshape(master.shape)
            at += part

    edit_tensors(folder, change)


def _walk(held: Tensors, names: list[str], flat: torch.Tensor) -> None:
    at, before = 0, dict(held)
    for name in names:
        held[name] = flat[at : at + before[name].numel()].reshape(before[name].shape)
        at += before[name].numel()
