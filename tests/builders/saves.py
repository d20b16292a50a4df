"""DeepSpeed saves of the sound releases' weights, and releases as a wrong reader would take them from such a save."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.builders.editing import Tensors, edit_tensors
from tests.builders.releases import SoundRelease
from tests.builders.zero import Zero, flat_vector, pieces_of, slice_of, write_zero
from tests.builders.zero_parallel import write_experts

FROZEN = "model.norm.weight"
EP_DEGREE = 2  # of saves with native experts
_EXPERT = re.compile(r"(?P<layer>.*\.)experts\.(?P<expert>\d+)(?P<rest>\..*)")
# name → (model of tests.builders.releases, layout)
SAVES: dict[str, tuple[str, dict[str, object]]] = {
    "zero2": ("dense", {"stage": 2, "world": 2, "maps": False}),
    "zero3": ("dense", {"stage": 3, "world": 3, "dtype": torch.float32}),
    "zero2_tied": ("tied", {"stage": 2, "world": 3, "aliases": {"lm_head.weight": "model.embed_tokens.weight"}}),
    "zero2_experts": ("moe", {"stage": 2, "world": 4}),
}


def save_release(name: str, root: Path, model: SoundRelease) -> SoundRelease:
    """Write the save `name` of SAVES under a root; returns its model's release as one exported from it."""
    zero = save_of(name, model.folder)
    experts: dict[int, Tensors] = {}
    for own, value in zero.masters.items():
        if match := _EXPERT.fullmatch(own):
            experts.setdefault(int(match["expert"]), {})[native_name(f"{match['layer']}experts.{{}}{match['rest']}")] = value
    if not experts:
        return replace(model, name=name, save=write_zero(root, zero))
    dense = replace(zero, masters={own: value for own, value in zero.masters.items() if not _EXPERT.fullmatch(own)})
    folder = write_experts(root, dense, [experts[number] for number in sorted(experts)], ep_degree=EP_DEGREE)
    return replace(model, name=name, save=folder, name_in_save=native_name)


def native_name(name: str) -> str:
    """Return what DeepSpeed's own expert layer calls a release's tensor."""
    return name.replace(".experts.", ".deepspeed_moe.experts.deepspeed_experts.")


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
    edit_tensors(folder, lambda held: held.update(without_padding(save_of("zero3", folder), None)))


def without_padding(save: Zero, slot: str | None) -> Tensors:
    """What a reader makes of a ZeRO-3 save's masters, or of a moment, that takes no padding into account: all but the first are shifted."""
    values = {name: master if slot is None else save.moment(slot, name) for name, master in save.masters.items()}
    vectors = [torch.cat([pieces_of(value, save.world)[rank] for value in values.values()]) for rank in range(save.world)]
    made, at = {}, 0
    for name, value in values.items():
        part = value.numel() // save.world
        rest = value.numel() - part * (save.world - 1)
        made[name] = torch.cat([*(vector[at : at + part] for vector in vectors[:-1]), vectors[-1][at : at + rest]]).reshape(value.shape)
        at += part
    return made


def _walk(held: Tensors, names: list[str], flat: torch.Tensor) -> None:
    at, before = 0, dict(held)
    for name in names:
        held[name] = flat[at : at + before[name].numel()].reshape(before[name].shape)
        at += before[name].numel()
