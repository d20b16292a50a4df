"""DeepSpeed saves of pipelines and of native experts, written by hand on top of tests.builders.zero. Nothing of the product is used."""

from dataclasses import replace
from pathlib import Path

import torch

from tests.builders.zero import Tensors, Zero, deepspeed_classes, model_states, optimizer_state

EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts.{}.w1.weight"


def write_pipeline(root: Path, stages: list[Zero], *, layers: dict[str, Tensors]) -> Path:
    """Write a pipeline's save: one Zero per stage, and the layer files (number → tensors without the layer's prefix)."""
    folder = root / stages[0].tag
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    degrees = {"mp_world_size": len(stages), "checkpoint_parallel_dimensions": {"pp_degree": len(stages), "tp_degree": 1}}
    with deepspeed_classes():
        for mp, stage in enumerate(stages):
            held = {**model_states(stage, 0), **degrees, "module": None, "buffer_names": [], "shared_params": {}}
            torch.save(held, folder / f"mp_rank_{mp:02d}_model_states.pt")
            for rank in range(stage.world):
                _save_optimizer(optimizer_state(stage, rank), folder, rank, mp)
        for number, tensors in layers.items():
            torch.save({name: value.to(torch.bfloat16) for name, value in tensors.items()}, folder / f"layer_{number}-model_states.pt")
    return folder


def write_experts(root: Path, dense: Zero, experts: list[Tensors], *, ep_degree: int) -> Path:
    """Write a save of `dense.world` ranks whose experts are spread over `ep_degree` of them, each group sharded. An expert, by its global
    number, is its tensors by name with `{}` for the number.
    """
    folder = root / dense.tag
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    local = len(experts) // ep_degree
    groups = [
        replace(
            dense,
            masters={name.format(n): value for n in range(local) for name, value in experts[ep_rank * local + n].items()},
            groups=(),
            world=dense.world // ep_degree,
            aliases={},
        )
        for ep_rank in range(ep_degree)
    ]
    states = model_states(dense, 0)
    shapes = states["param_shapes"]
    assert isinstance(shapes, list)
    states["param_shapes"] = [*shapes, {name: value.shape for name, value in groups[0].masters.items()}]
    with deepspeed_classes():
        torch.save({**states, "num_experts": [len(experts)]}, folder / "mp_rank_00_model_states.pt")
        for rank in range(dense.world):
            own = optimizer_state(groups[rank % ep_degree], rank // ep_degree)
            _save_optimizer(_joined(optimizer_state(dense, rank), own), folder, rank, 0)
        for number, tensors in enumerate(experts):
            held = {name.format(number): value.to(dense.dtype) for name, value in tensors.items()}
            torch.save(held, folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    return folder


def write_tensor_parallel(root: Path, ranks: list[Zero], told: dict[str, object] | None, *, stages: int = 1) -> Path:
    """Write a save of tensor-parallel ranks, each with its parts of every parameter; `told` is what it says of how they join. With
    `stages`, the ranks are those of the first pipeline stage, then of the next.
    """
    folder = root / ranks[0].tag
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    tp_degree = len(ranks) // stages
    more = {"mp_world_size": len(ranks), "checkpoint_parallel_dimensions": {"pp_degree": stages, "tp_degree": tp_degree}}
    more |= {"universal_checkpoint_info": told} if told is not None else {}
    more |= {"module": None, "buffer_names": []} if stages > 1 else {}
    with deepspeed_classes():
        for mp, zero in enumerate(ranks):
            for rank in range(zero.world):
                name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt" if zero.stage == 3 else f"mp_rank_{mp:02d}_model_states.pt"
                if zero.stage == 3 or rank == 0:
                    torch.save({**model_states(zero, rank), **more}, folder / name)
                if zero.stage:
                    _save_optimizer(optimizer_state(zero, rank), folder, rank, mp)
    return folder


def _joined(dense: dict[str, object], experts: dict[str, object]) -> dict[str, object]:
    # One rank's optimizer file of both: its groups one behind the other.
    joined = dict(dense)
    for key, value in experts.items():
        if isinstance(value, list):
            joined[key] = [*dense[key], *value]  # type: ignore[misc]  # lists in both
    state = [*dense["base_optimizer_state"]["state"].values(), *experts["base_optimizer_state"]["state"].values()]  # type: ignore[index]
    joined["base_optimizer_state"] = {"state": dict(enumerate(state)), "param_groups": [{"params": [g]} for g in range(len(state))]}
    return joined


def _save_optimizer(held: dict[str, object], folder: Path, rank: int, mp: int) -> None:
    torch.save({"optimizer_state_dict": held}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
