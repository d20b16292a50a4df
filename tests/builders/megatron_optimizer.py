"""Optimizers as Megatron-LM's ranks write them beside the model in legacy files; every moment is a multiple of its parameter."""

import torch

MOMENTS = {"exp_avg": 2.0, "exp_avg_sq": 3.0}  # slot → what the parameter is multiplied by
MASTER = 4.0


def add_optimizer(held: dict[str, object], kind: str) -> object:
    """Put an optimizer into what a rank's file holds; return what `distrib_optim.pt` holds, None where there is none."""
    chunks = [held[key] for key in held if key.startswith("model")]
    params = [(n, v) for chunk in chunks for n, v in chunk.items() if isinstance(v, torch.Tensor)]  # type: ignore[attr-defined]
    kinds = [[p for p in params if (".experts." in p[0]) == is_expert] for is_expert in (False, True)]
    made, vectors = [], []
    for is_expert, own in enumerate(kinds):
        if not kind or not own:
            continue
        groups = [[p for p in own if (p[1].ndim == 1 or p[0].endswith("bias")) == is_flat] for is_flat in (False, True)]
        groups = [group for group in groups if group]
        described, state, first = [], {}, 0
        for group in groups:
            numbers = list(range(first, first + len(group)))
            first += len(group)
            decays = 0.0 if group[0][1].ndim == 1 else 1.0
            common = {"wd_mult": decays, "lr_mult": 1.0, "is_expert_parallel": bool(is_expert), "is_decoupled_lr": False}
            described.append(common | ({"step": 5} if kind == "distributed" else {"params": numbers}))
            for number, (_, value) in zip(numbers, group, strict=True):
                state[number] = {"step": torch.tensor(5.0)} | {slot: value.float() * factor for slot, factor in MOMENTS.items()}
        inner = {"param_groups": described} | ({} if kind == "distributed" else {"state": state})
        masters = [[value.float() * MASTER for _, value in group] for group in groups]
        made.append({"optimizer": inner, "fp32_from_fp16_params": masters} if kind == "masters" else inner)
        vectors.append({"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): _flatten(own)}})
    if made:
        held["optimizer"] = made if len(made) > 1 else made[0]
    if kind != "distributed":
        return None
    return vectors if len(vectors) > 1 else vectors[0]


def _flatten(params: list[tuple[str, torch.Tensor]]) -> dict[str, object]:
    # From the last parameter to the first, each from a multiple of 64.
    flat: list[torch.Tensor] = []
    length = 0
    for _, value in reversed(params):
        gap = -length % 64
        flat += [torch.full((gap,), float("nan")), value.float().reshape(-1)]
        length += gap + value.numel()
    whole_vector = torch.cat(flat)
    slots = {"param": MASTER, **MOMENTS}
    return {slot: whole_vector * factor for slot, factor in slots.items()} | {"numel_unpadded": length}
