"""Universal checkpoints as DeepSpeed's converter leaves them, from the saves of tests.builders.zero. Nothing of the product is used."""

from pathlib import Path

import torch

from tests.builders.zero import SLOTS, Tensors, Zero, deepspeed_classes, model_states, optimizer_state


def write_universal(root: Path, zero: Zero, *, surplus: int = 0) -> Path:
    """Write a universal checkpoint under a root with `latest_universal`; returns its folder.

    From ZeRO-1 and -2, tensors keep their shape; from ZeRO-3 they are flat, with `surplus` elements of nothing behind, without steps and
    frozen weights.
    """
    folder = root / f"{zero.tag}_universal"
    folder.mkdir(parents=True)
    (root / "latest_universal").write_text(folder.name)
    with deepspeed_classes():
        for rank in range(zero.world if zero.stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if zero.stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model_states(zero, rank), folder / name)
        for name, master in zero.masters.items():
            _write(folder / "zero" / name, {"fp32": master, **{slot: zero.moment(slot, name) for slot in SLOTS}}, zero, surplus)
        if zero.stage < 3:
            for name, value in {**zero.buffers, **{k: v.to(zero.dtype) for k, v in zero.frozen.items()}}.items():
                _write(folder / "zero" / name, {"fp32": value.float()}, zero, 0)
        held = optimizer_state(zero, 0)
        torch.save(held if zero.stage == 3 else {"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    return folder


def universal_truth(zero: Zero) -> Tensors:
    """The weights that such a checkpoint holds."""
    frozen = {name: value.to(zero.dtype) for name, value in zero.frozen.items()}
    frozen = frozen if zero.stage == 3 else {name: value.float() for name, value in frozen.items()}
    held = {**zero.masters, **frozen, **zero.buffers}
    return {**held, **{alias: held[stored] for alias, stored in zero.aliases.items()}}


def _write(folder: Path, slots: Tensors, zero: Zero, surplus: int) -> None:
    folder.mkdir(parents=True)
    for slot, value in slots.items():
        flat = torch.cat([value.reshape(-1), torch.full((surplus,), -9.0)])
        torch.save(flat if zero.stage == 3 else {"param": value.clone(), "cat_dim": 0}, folder / f"{slot}.pt")
    if zero.stage < 3 and len(slots) > 1:
        torch.save(torch.tensor(float(zero.steps)), folder / "step.pt")
