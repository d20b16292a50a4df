"""DeepSpeed saves, written by hand as DeepSpeed lays them out: flatten, pad, cut, torch.save. Nothing of the product is used.

Pickles name DeepSpeed's classes as the real ones do: stand-in modules are there while a file is written.
"""

import contextlib
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]
SLOTS = ("exp_avg", "exp_avg_sq")


class LossScaler:
    """As DeepSpeed's."""

    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class DynamicLossScaler(LossScaler):
    """As DeepSpeed's, of fp16 runs."""


class ZeroStageEnum(IntEnum):
    """As DeepSpeed's."""

    disabled, optimizer_states, gradients, weights = range(4)


class fragment_address:
    """As DeepSpeed's."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


_MODULES: Mapping[str, tuple[type, ...]] = {
    "deepspeed.runtime.fp16.loss_scaler": (LossScaler, DynamicLossScaler),
    "deepspeed.runtime.zero.config": (ZeroStageEnum,),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
}


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Let the classes above be pickled under DeepSpeed's names."""
    parts = [name.split(".") for name in _MODULES]
    packages = {".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)}
    held, own = {name: sys.modules.get(name) for name in packages}, {kind: kind.__module__ for kinds in _MODULES.values() for kind in kinds}
    sys.modules |= {name: types.ModuleType(name) for name in packages}
    for name, kinds in _MODULES.items():
        for kind in kinds:
            setattr(sys.modules[name], kind.__name__, kind)
            kind.__module__ = name
    try:
        yield
    finally:
        for kind, module in own.items():
            kind.__module__ = module
        for name, module in held.items():
            sys.modules.pop(name)
            sys.modules |= {name: module} if module is not None else {}


@dataclass(frozen=True)
class Zero:
    """One save. `groups` are the trained parameters of each group, in the flat order; `module` is the model's order of names.

    `gap` unused elements follow each parameter; `layout` is "zero", "bf16" (BF16_Optimizer), or "elastic"; `step` may be an int as
    DeepSpeed's own optimizers keep it. `sub_numel` cuts ZeRO-3 groups into sub-groups. `moments` are given by slot and name, or drawn.
    With `round_robin`, the ranks' maps are of another order than the vectors, as the real ones are.
    """

    masters: Tensors
    stage: int = 2
    world: int = 2
    dtype: torch.dtype = torch.bfloat16
    groups: tuple[tuple[str, ...], ...] = ()
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    layout: str = "zero"
    gap: int = 0
    sub_numel: int = 10**12
    steps: int = 4
    int_steps: bool = False
    maps: bool = True
    old: bool = False
    round_robin: bool = False
    client: dict[str, object] = field(default_factory=dict)
    tag: str = "global_step4"
    moments: dict[str, Tensors] = field(default_factory=dict)

    @property
    def order(self) -> list[list[str]]:
        """The flat groups: of ZeRO-3, the sub-groups."""
        groups = [list(group) for group in self.groups] or [list(self.masters)]
        if self.stage < 3:
            return groups
        made: list[list[str]] = []
        for group in groups:
            made.append([])
            for name in group:
                if made[-1] and sum(self.masters[other].numel() for other in made[-1]) >= self.sub_numel:
                    made.append([])
                made[-1].append(name)
        return made

    def moment(self, slot: str, name: str) -> torch.Tensor:
        """What the optimizer keeps of a parameter."""
        if slot in self.moments:
            return self.moments[slot][name]
        seed = sum(map(ord, slot + name))
        return torch.randn(self.masters[name].shape, generator=torch.Generator().manual_seed(seed))

    @property
    def truth(self) -> Tensors:
        """The weights that the save holds: masters, the rest as trained, aliases."""
        held = {**self.masters, **{name: value.to(self.dtype) for name, value in self.frozen.items()}, **self.buffers}
        return {**held, **{alias: held[stored] for alias, stored in self.aliases.items()}}


def example(stage: int, world: int, **layout: object) -> Zero:
    """A save with two groups, frozen weights, buffers and a tied head, in a layout of your choice."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed.weight": (7, 3), "layers.0.up.weight": (5, 3), "layers.0.cube": (3, 2, 5), "layers.0.bias": (5,), "norm.weight": (3,)}
    masters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return Zero(
        masters,
        stage,
        world,
        groups=(("layers.0.cube", "embed.weight", "layers.0.up.weight"), ("norm.weight", "layers.0.bias")),
        frozen={"adapter.weight": torch.randn(3, 3, generator=generator)},
        buffers={"scale": torch.randn(2, generator=generator), "count": torch.tensor(11)},
        aliases={"head.weight": "embed.weight"},
        **layout,  # type: ignore[arg-type]  # fields of Zero
    )


def write_zero(root: Path, zero: Zero) -> Path:
    """Write a save under a root with `latest`; returns the save's folder."""
    folder = root / zero.tag
    folder.mkdir(parents=True, exist_ok=True)
    (root / "latest").write_text(zero.tag)
    with deepspeed_classes():
        for rank in range(zero.world):
            if zero.stage == 3:
                torch.save(model_states(zero, rank), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            elif rank == 0:
                torch.save(model_states(zero, 0), folder / "mp_rank_00_model_states.pt")
            prefix = "bf16_" if zero.dtype == torch.bfloat16 else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00{'' if zero.old else '_'}optim_states.pt"
            if zero.stage:
                torch.save({"optimizer_state_dict": optimizer_state(zero, rank), "ds_config": {}, "ds_version": "0.19.8"}, folder / name)
    return folder


def model_states(zero: Zero, rank: int) -> dict[str, object]:
    """What a rank's file of model states holds."""
    weights = {name: value.to(zero.dtype) for name, value in {**zero.masters, **zero.frozen}.items()}
    module: Tensors = {**zero.buffers, **weights}
    module |= {alias: module[stored] for alias, stored in zero.aliases.items()}
    if zero.stage == 3:
        module = {name: value if name in zero.buffers else torch.tensor([], dtype=zero.dtype) for name, value in module.items()}
    shapes = [OrderedDict((name, zero.masters[name].shape) for name in group) for group in zero.order]
    frozen_shapes, fragments = None, None
    if zero.stage >= 2:
        frozen_shapes = OrderedDict((name, value.shape) for name, value in zero.frozen.items())
        pieces = {name: pieces_of(weights[name], zero.world)[rank] if zero.stage == 3 else weights[name] for name in zero.frozen}
        fragments = OrderedDict((name, piece.clone()) for name, piece in pieces.items())
    return {
        "module": OrderedDict(module),
        "buffer_names": list(zero.buffers),
        "optimizer": None,
        "param_shapes": shapes if zero.stage else None,
        "frozen_param_shapes": frozen_shapes,
        "shared_params": dict(zero.aliases) if rank == 0 and not zero.old else {},
        "frozen_param_fragments": fragments,
        "lr_scheduler": {"last_batch_iteration": zero.steps - 1},
        "global_steps": zero.steps,
        "dp_world_size": zero.world,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": zero.stage, "round_robin_gradients": zero.round_robin}},
        "ds_version": "0.19.8",
        **zero.client,
    }


def optimizer_state(zero: Zero, rank: int) -> dict[str, object]:
    """What a rank's optimizer file holds of the optimizer."""
    step: object = zero.steps if zero.int_steps else torch.tensor(float(zero.steps))
    if zero.stage == 3:
        vectors = [_sharded(zero, group, rank, None) for group in zero.order]
        state = {g: {"step": step, **{slot: _sharded(zero, group, rank, slot) for slot in SLOTS}} for g, group in enumerate(zero.order)}
        inner = {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(vectors)))}]}
        return {**_scaler(zero), "partition_count": zero.world, "optimizer_state_dict": inner, "fp32_flat_groups": vectors}
    flats = [flat_vector(zero, group, None) for group in zero.order]
    paddings = [len(flat) - _numel(zero, group) for flat, group in zip(flats, zero.order, strict=True)]
    parts = [slice_of(flat, rank, zero.world) for flat in flats]
    state = {
        g: {"step": step, **{slot: slice_of(flat_vector(zero, group, slot), rank, zero.world).clone() for slot in SLOTS}}
        for g, group in enumerate(zero.order)
    }
    held: dict[str, object] = {"clip_grad": 1.0, "partition_count": zero.world if zero.old else [zero.world] * len(flats)}
    stripped = [part[: len(part) - padding] if rank == zero.world - 1 else part for part, padding in zip(parts, paddings, strict=True)]
    held["group_paddings"] = [padding if rank == zero.world - 1 else 0 for padding in paddings]
    held["single_partition_of_fp32_groups"] = parts if zero.layout == "bf16" else stripped
    if zero.layout != "bf16":
        held |= _scaler(zero)
    if not zero.old:
        held["param_alignment_paddings"] = [[zero.gap] * len(group) for group in zero.order]
    if zero.maps and not zero.old:
        held["param_slice_mappings"] = [_map(zero, group, rank) for group in zero.order]
    groups = [{"lr": 0.1, "params": [g]} for g in range(len(flats))]
    if zero.layout == "elastic":
        lean = [{slot: own[slot][: len(stripped[g])] for slot in SLOTS} for g, own in state.items()]
        return {**held, "base_optimizer_state": lean, "base_optimizer_state_step": step}
    return {**held, "base_optimizer_state": {"state": state, "param_groups": groups}}


def _scaler(zero: Zero) -> dict[str, object]:
    scaler = DynamicLossScaler() if zero.dtype == torch.float16 else LossScaler()
    stage = zero.stage if zero.old else ZeroStageEnum(zero.stage)
    return {"zero_stage": stage, "loss_scaler": scaler, "dynamic_loss_scale": zero.dtype == torch.float16, "overflow": False}


def _values(zero: Zero, name: str, slot: str | None) -> torch.Tensor:
    return (zero.masters[name] if slot is None else zero.moment(slot, name)).reshape(-1)


def flat_vector(zero: Zero, group: list[str], slot: str | None) -> torch.Tensor:
    """All of a group's values one behind the other, with gaps and padding; of the masters where `slot` is None."""
    junk = torch.full((zero.gap,), -7.0)
    flat = torch.cat([part for name in group for part in (_values(zero, name, slot), junk)])
    return torch.cat([flat, torch.full((-len(flat) % (2 * zero.world),), -9.0)])


def slice_of(flat: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """One rank's equal slice of a vector."""
    size = len(flat) // world
    return flat[rank * size : (rank + 1) * size]


def _numel(zero: Zero, group: list[str]) -> int:
    return sum(zero.masters[name].numel() + zero.gap for name in group)


def pieces_of(value: torch.Tensor, world: int) -> list[torch.Tensor]:
    """A ZeRO-3 parameter's pieces, one per rank, the last padded."""
    flat = value.reshape(-1)
    size = -(-len(flat) // world)
    return list(torch.cat([flat, torch.full((size * world - len(flat),), -9.0, dtype=flat.dtype)]).split(size)) if size else [flat] * world


def _sharded(zero: Zero, group: list[str], rank: int, slot: str | None) -> torch.Tensor:
    return torch.cat([pieces_of(_values(zero, name, slot), zero.world)[rank] for name in group])


def _map(zero: Zero, group: list[str], rank: int) -> OrderedDict[str, fragment_address]:
    size = len(flat_vector(zero, group, None)) // zero.world
    found, at = OrderedDict(), 0
    for name in reversed(group) if zero.round_robin else group:
        first, last = max(at, rank * size), min(at + zero.masters[name].numel(), (rank + 1) * size)
        if first < last:
            found[name] = fragment_address(last - first, first - rank * size)
        at += prod(zero.masters[name].shape) + zero.gap
    return found
