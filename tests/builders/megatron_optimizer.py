"""Optimizers as Megatron-LM's ranks write them beside the model in legacy files; every moment is a multiple of its parameter."""

import math
from collections.abc import Collection

import torch

MOMENTS = {"exp_avg": 2.0, "exp_avg_sq": 3.0}  # slot → what the parameter is multiplied by
MASTER = 4.0
Params = list[tuple[str, torch.Tensor]]


def add_optimizer(held: dict[str, object], kind: str, *, is_first: bool = True, stages: int = 1) -> object:
    """Put an optimizer into what a rank's file holds; return what `distrib_optim.pt` holds, None where there is none.

    `is_first` says whether the rank is the first of its dense data-parallel group, `stages` how many pipeline stages there are. Buckets are
    as long as `ddp_bucket_size` of the args.
    """
    args = held["args"]
    chunks = [held[key] for key in held if key.startswith("model")]
    apart = args.expert_model_parallel_size > 1  # type: ignore[attr-defined]
    shared = () if args.untie_embeddings_and_output_weights or stages == 1 else ("word_embeddings.weight", "output_layer.weight")  # type: ignore[attr-defined]
    made, vectors = [], []
    for is_expert in (False, True):
        by_chunk = [
            [(n, v) for n, v in chunk.items() if isinstance(v, torch.Tensor) and (apart and ".experts." in n) == is_expert]  # type: ignore[attr-defined]
            for chunk in chunks
        ]
        own = [param for params in by_chunk for param in params]
        if not kind or not own:
            continue
        groups = [[p for p in own if (p[1].ndim == 1 or p[0].endswith("bias")) == is_flat] for is_flat in (False, True)]
        groups = [group for group in groups if group]
        described, state, first = [], {}, 0
        for group in groups:
            numbers = list(range(first, first + len(group)))
            first += len(group)
            decays = 0.0 if group[0][1].ndim == 1 else 1.0
            common = {"wd_mult": decays, "lr_mult": 1.0, "is_expert_parallel": is_expert, "is_decoupled_lr": False}
            described.append(common | ({"step": 5} if kind == "distributed" else {"params": numbers}))
            for number, (_, value) in zip(numbers, group, strict=True):
                state[number] = {"step": torch.tensor(5.0)} | {slot: value.float() * factor for slot, factor in MOMENTS.items()}
        inner = {"param_groups": described} | ({} if kind == "distributed" else {"state": state})
        masters = [[value.float() * MASTER for _, value in group] for group in groups]
        made.append({"optimizer": inner, "fp32_from_fp16_params": masters} if kind == "masters" else inner)
        size = getattr(args, "ddp_bucket_size", None)
        vectors.append(_buffers([params for params in by_chunk if params], size, shared) if is_expert or is_first else None)
    if made:
        held["optimizer"] = made if len(made) > 1 else made[0]
    if kind != "distributed":
        return None
    return vectors if len(vectors) > 1 else vectors[0]


def _buffers(by_chunk: list[Params], bucket_size: int | None, shared: Collection[str]) -> dict[object, object]:
    # One per virtual stage; the padding behind each bucket is left out, and the buckets are joined.
    made: dict[object, object] = {"buckets_coalesced": True}
    slots = {"param": MASTER, **MOMENTS}
    for number, params in enumerate(by_chunk):
        joined = torch.cat([piece for bucket in flat_buckets(params, bucket_size if number == 0 else None, shared) for piece in bucket])
        vectors = {slot: joined * factor for slot, factor in slots.items()}
        made[number] = {(torch.bfloat16, torch.float32): vectors | {"numel_unpadded": len(joined)}}
    return made


def flat_buckets(params: Params, bucket_size: int | None, shared: Collection[str]) -> list[list[torch.Tensor]]:
    """The pieces (parameters, and NaN between them) of a buffer's buckets, without the padding behind each.

    From the last parameter to the first, each at a multiple of 64 of the buffer.
    A bucket ends when it has `bucket_size` elements; a parameter named in `shared` has one of its own.
    """
    buckets: list[list[torch.Tensor]] = [[]]
    at = 0  # in the buffer, whose buckets are padded to multiples of 128

    def close() -> None:
        nonlocal at
        if buckets[-1]:
            at = math.ceil(at / 128) * 128
            buckets.append([])

    for name, value in reversed(params):
        gap = -at % 64
        if name.endswith(tuple(shared)) and shared and buckets[-1]:
            buckets[-1].append(torch.full((gap,), float("nan")))
            at += gap
            close()
            gap = 0
        buckets[-1] += [torch.full((gap,), float("nan")), value.float().reshape(-1)]
        at += gap + value.numel()
        length = sum(map(len, buckets[-1]))
        if (bucket_size is not None and length >= bucket_size) or (shared and name.endswith(tuple(shared))):
            close()
    return [bucket for bucket in buckets if bucket]
