"""The parameters of a Megatron save as the ranks hold them: for each name of a stage, the shards in rank order, to be read one by one.

Nothing is merged: a shard of the legacy format is a rank's own tensor. The torch_dist format keeps no ranks' shards of a gated fc1, so
that each of its parameters is put together from its boxes, and runs as on one rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reports.errors import FormatError, name_some
from tasks.witnesses.boxes import StoredBox
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.megatron import decode_megatron_dist
from tasks.witnesses.megatron_ranks import Args, Rank, load_common_args, load_ranks, single_names, store_whole

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
# Every parameter that the forward uses. Anything else that is stored keeps the witness silent, unless it is no weight of the decoder.
_PART = r"(?:weight|bias)"
_USED = re.compile(
    r"embedding\.(?:word|position)_embeddings\.weight|output_layer\.weight"
    rf"|decoder\.final_layernorm\.{_PART}"
    rf"|decoder\.layers\.\d+\.(?:input_layernorm|pre_mlp_layernorm)\.{_PART}"
    rf"|decoder\.layers\.\d+\.self_attention\.(?:linear_qkv|linear_proj|q_layernorm|k_layernorm)\.{_PART}"
    rf"|decoder\.layers\.\d+\.(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_{_PART}"
    rf"|decoder\.layers\.\d+\.mlp\.(?:experts\.local_experts\.\d+\.|shared_experts\.)?linear_fc[12]\.{_PART}(?:_[wv])?"
    r"|decoder\.layers\.\d+\.mlp\.(?:router\.weight|shared_experts\.gate_weight)"
)
_NO_WEIGHT = re.compile(r"mtp\..*|rotary_pos_emb\..*|.*_extra_state.*|.*\.router\.local_tokens_per_expert|rng_state.*|rerun_state.*")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a parameter: boxes that tile it."""

    boxes: tuple[StoredBox, ...]

    def read(self) -> torch.Tensor:
        """Return the values in fp32.

        Returns:
            A new tensor.

        Raises:
            FormatError: the boxes leave a part of it out.
        """
        shape = tuple(max(box.box.offset[d] + box.box.shape[d] for box in self.boxes) for d in range(len(self.boxes[0].box.shape)))
        values = torch.empty(shape, dtype=torch.float32)
        if sum(box.box.numel for box in self.boxes) != values.numel():
            raise FormatError(f"boxes of {sum(box.box.numel for box in self.boxes)} elements do not tile shape {shape}")
        for stored in self.boxes:
            box = stored.box
            with stored.open() as read:
                values[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] = read(
                    (0,) * len(shape), box.shape
                ).float()
        return values


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run: its layers by local number, and each parameter's shards in the order of the ranks that hold them."""

    num_layers: int
    shards: Mapping[str, tuple[Shard, ...]]

    def names(self, prefix: str) -> list[str]:
        """Return the parameters of a module.

        Args:
            prefix: its name with the point behind it.

        Returns:
            Names, without the prefix.
        """
        return [name.removeprefix(prefix) for name in self.shards if name.startswith(prefix)]


def load_stages(format_name: str, roots: tuple[Path, ...]) -> tuple[Args, tuple[Stage, ...]]:
    """Return a run's arguments and its stages, in the order in which a token passes them.

    Args:
        format_name: "megatron" or "megatron_dist".
        roots: the save's folders, the main one first.

    Returns:
        Arguments, and stages.

    Raises:
        NotHeardError: no args, or parameters this forward does not use.
        FormatError: damaged.
    """
    args, stages = _FORMATS[format_name](roots)
    unused = sorted({name for stage in stages for name in stage.shards if not _USED.fullmatch(name) and not _NO_WEIGHT.fullmatch(name)})
    if unused:
        raise NotHeardError(f"the save holds parameters that this forward does not use: {name_some(unused)}")
    return args, stages


def _load_legacy(roots: tuple[Path, ...]) -> tuple[Args, tuple[Stage, ...]]:
    ranks = load_ranks(roots)
    depth = max(len(rank.chunks) for rank in ranks)
    return ranks[0].args, tuple(
        _stage([rank for rank in ranks if rank.pp == pp], chunk) for chunk in range(depth) for pp in sorted({rank.pp for rank in ranks})
    )


def _stage(ranks: Sequence[Rank], chunk: int) -> Stage:
    # Dense parameters once per tensor-parallel rank, experts once per expert-tensor-parallel rank, under their numbers in the whole model.
    held: dict[str, dict[int, Shard]] = {}
    for rank in ranks:
        for name, values in single_names(rank, rank.chunks[chunk]).items():
            is_expert = _EXPERT.search(name) is not None
            index = rank.tp % rank.expert_tp if is_expert else rank.tp
            first = rank.ep * rank.experts
            whole_name = _EXPERT.sub(lambda match, first=first: f".experts.local_experts.{int(match[1]) + first}.", name)  # type: ignore[misc]
            held.setdefault(whole_name, {}).setdefault(index, Shard((store_whole(rank.path, values, (0,) * values.ndim),)))
    return Stage(_count_layers(held), {name: tuple(shards[index] for index in sorted(shards)) for name, shards in held.items()})


def _count_layers(names: Mapping[str, object]) -> int:
    return 1 + max((int(match[1]) for match in map(_LAYER.match, names) if match), default=-1)


def _load_dist(roots: tuple[Path, ...]) -> tuple[Args, tuple[Stage, ...]]:
    stored = {name: (Shard(boxes),) for name, boxes in decode_megatron_dist(roots).items()}
    return load_common_args(roots), (Stage(_count_layers(stored), dict(join_halves(stored))),)


def join_halves(stored: Mapping[str, tuple[Shard, ...]]) -> Iterator[tuple[str, tuple[Shard, ...]]]:
    """Yield parameters, the halves of a gated fc1 as one: torch_dist's singleton shards keep gate rows in `weight_w`, up in `weight_v`.

    Args:
        stored: one shard by name each.

    Yields:
        Names and shards.
    """
    for name, (shard,) in stored.items():
        if not name.endswith(("_w", "_v")):
            yield name, (shard,)
        elif name.endswith("_w"):
            (up,) = stored[f"{name[:-2]}_v"]
            yield name[:-2], (Halves(shard.boxes, up),)


@dataclass(frozen=True, slots=True)
class Halves(Shard):
    """A gated fc1 that is stored as two tensors."""

    up: Shard

    def read(self) -> torch.Tensor:
        """Return gate rows above up rows, in fp32.

        Returns:
            A new tensor.
        """
        return torch.cat([Shard(self.boxes).read(), self.up.read()])


_FORMATS = {"megatron": _load_legacy, "megatron_dist": _load_dist}
FORMATS = frozenset(_FORMATS)
