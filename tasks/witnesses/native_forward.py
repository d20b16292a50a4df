"""Witness *native forward*: a Megatron save run as its trainer ran it, in plain torch and fp32, from the ranks' own tensors.

No shard is merged and no name is mapped: column-parallel weights give columns of the output, row-parallel ones summands, vocabulary shards
look up their own ids, experts run where they lie, layers in the order of stages and virtual stages. So it judges the mapping, and needs no
recorded logits. One parameter is in memory at a time.

Shapes: N tokens of all batches, H hidden, V rows of the (padded) vocabulary; per head D, G groups, R query heads per group.

Source: Megatron-LM core 0.12 to main, megatron/core/{tensor_parallel/layers.py,transformer/{attention,mlp,transformer_layer}.py}.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from reports.errors import FormatError
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.native_recipe import Recipe, read_recipe
from tasks.witnesses.native_shards import FORMATS, Stage, load_stages

NAME = "native forward"
_EMBEDDING, _POSITIONS, _HEAD = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"
_FINAL = "decoder.final_layernorm"


@dataclass(frozen=True, slots=True)
class Native:
    """What the run gave, by batch: logits (B, S, V) fp32, and hidden states (B, S, H), the embeddings' first, the final norm's last."""

    logits: tuple[torch.Tensor, ...]
    hidden: tuple[tuple[torch.Tensor, ...], ...]


def run_native(source_format: str, roots: tuple[Path, ...], batches: Sequence[torch.Tensor]) -> Native:
    """Run batches through a save.

    Args:
        source_format: as the plan names it.
        roots: the save's folders, the main one first.
        batches: ids, (B, S) int64 each.

    Returns:
        Logits and hidden states.

    Raises:
        NotHeardError: not a save of Megatron's, or one that computes what this forward was not taught.
        FormatError: damaged.
    """
    if source_format not in FORMATS:
        raise NotHeardError(f"runs what Megatron's ranks hold, this source is {source_format!r}")
    args, stages = load_stages(source_format, roots)
    recipe = read_recipe(args)
    try:
        with torch.inference_mode():
            return _Forward(recipe, stages, batches).run()
    except (RuntimeError, KeyError) as error:  # torch's word for shapes that do not fit; a parameter that is nowhere
        raise NotHeardError(f"the ranks' tensors do not run: {str(error).strip().splitlines()[0]}") from None


class _Forward:
    # Tokens of all batches lie behind each other: what works on single tokens reads each weight once.
    def __init__(self, recipe: Recipe, stages: tuple[Stage, ...], batches: Sequence[torch.Tensor]) -> None:
        self._recipe, self._stages, self._batches = recipe, stages, batches

    def run(self) -> Native:
        x_NH = self._embed()
        hidden = [x_NH]
        for stage in self._stages:
            for layer in range(stage.num_layers):
                x_NH = _Layer(stage, f"decoder.layers.{layer}.", self._recipe).run(x_NH, self._batches)
                hidden.append(x_NH)
        last = next(stage for stage in reversed(self._stages) if f"{_FINAL}.weight" in stage.shards)
        top_NH = _norm(last, f"{_FINAL}.weight", f"{_FINAL}.bias", self._recipe)(x_NH, 0)
        hidden = [*hidden[:-1], top_NH]
        head = last.shards.get(_HEAD) or self._stages[0].shards[_EMBEDDING]  # of a tied model, a later stage holds a copy
        logits_NV = torch.cat([top_NH @ shard.read().T for shard in head], -1)
        by_layer = [self._split(state) for state in hidden]
        return Native(self._split(logits_NV), tuple(zip(*by_layer, strict=True)))

    def _embed(self) -> torch.Tensor:
        first = self._stages[0]
        ids_N = torch.cat([ids.reshape(-1) for ids in self._batches])
        x_NH, start = None, 0
        for shard in first.shards[_EMBEDDING]:
            rows_VH = shard.read()
            own_N = (ids_N >= start) & (ids_N < start + len(rows_VH))
            part_NH = rows_VH[torch.where(own_N, ids_N - start, 0)] * own_N[:, None]
            x_NH = part_NH if x_NH is None else x_NH + part_NH
            start += len(rows_VH)
        assert x_NH is not None
        if _POSITIONS in first.shards:
            positions = torch.cat([torch.arange(ids.shape[1]).repeat(ids.shape[0]) for ids in self._batches])
            x_NH = x_NH + first.shards[_POSITIONS][0].read()[positions]
        return x_NH

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(values[part].reshape(*ids.shape, -1) for part, ids in _spans(self._batches))


def _spans(batches: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    start = 0
    for ids in batches:
        yield slice(start, start + ids.numel()), ids
        start += ids.numel()


Norm = Callable[[torch.Tensor, int], torch.Tensor]  # values and the tensor-parallel rank whose copy of the weights is used


def _norm(stage: Stage, weight: str, bias: str, recipe: Recipe) -> Norm:
    weights = [shard.read() for shard in stage.shards[weight]]
    biases = [shard.read() for shard in stage.shards.get(bias, ())]

    def apply(x: torch.Tensor, rank: int) -> torch.Tensor:
        if recipe.norm == "LayerNorm":
            return functional.layer_norm(x, x.shape[-1:], weights[rank], biases[rank] if biases else None, recipe.eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + recipe.eps) * weights[rank]

    return apply


class _Layer:
    def __init__(self, stage: Stage, prefix: str, recipe: Recipe) -> None:
        self._stage, self._prefix, self._recipe = stage, prefix, recipe

    def run(self, x_NH: torch.Tensor, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        x_NH = x_NH + self._attend(x_NH, batches)
        norm = self._one_norm("pre_mlp_layernorm.{}", "mlp.linear_fc1.layer_norm_{}")
        if self._has("mlp.router.weight"):
            return x_NH + self._mix(norm(x_NH, 0))
        return x_NH + self._mlp("mlp", norm, x_NH)

    def _has(self, name: str) -> bool:
        return self._prefix + name in self._stage.shards

    def _read(self, name: str) -> list[torch.Tensor]:
        return [shard.read() for shard in self._stage.shards.get(self._prefix + name, ())]

    def _one_norm(self, *names: str) -> Norm:
        # One norm, under its own name or under that of the linear it is fused into.
        found = [name for name in names if self._has(name.format("weight"))]
        if len(found) != 1:
            raise NotHeardError(f"{self._prefix}: {len(found)} of the norms {', '.join(names)}")
        weight, bias = (self._prefix + found[0].format(part) for part in ("weight", "bias"))
        return _norm(self._stage, weight, bias, self._recipe)

    def _columns(self, name: str, norm: Norm, x_NH: torch.Tensor) -> list[torch.Tensor]:
        # Each rank's columns of a column-parallel linear, on its own copy of the norm.
        biases = self._read(f"{name}.bias")
        parts = []
        for rank, shard in enumerate(self._stage.shards[f"{self._prefix}{name}.weight"]):
            parts.append(functional.linear(norm(x_NH, rank), shard.read(), biases[rank] if biases else None))
        return parts

    def _rows(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        # The sum of what the ranks of a row-parallel linear give; its bias is added once.
        total = None
        for part, shard in zip(parts, self._stage.shards[f"{self._prefix}{name}.weight"], strict=True):
            partial = part @ shard.read().T
            total = partial if total is None else total + partial
        assert total is not None
        biases = self._read(f"{name}.bias")
        return total + biases[0] if biases else total

    def _attend(self, x_NH: torch.Tensor, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        recipe = self._recipe
        norm = self._one_norm("input_layernorm.{}", "self_attention.linear_qkv.layer_norm_{}")
        mixed = torch.cat(self._columns("self_attention.linear_qkv", norm, x_NH), -1)
        per_group = recipe.num_heads // recipe.groups
        heads_NGRD = mixed.reshape(len(x_NH), recipe.groups, per_group + 2, recipe.head_dim)
        q, k, v = heads_NGRD[:, :, :per_group], heads_NGRD[:, :, per_group : per_group + 1], heads_NGRD[:, :, per_group + 1 :]
        q, k = self._head_norm("q", q), self._head_norm("k", k)
        parts = [self._attend_batch(q[span], k[span], v[span], ids) for span, ids in _spans(batches)]
        out = torch.cat(parts)
        shards = self._stage.shards[f"{self._prefix}self_attention.linear_proj.weight"]
        return self._rows("self_attention.linear_proj", out.chunk(len(shards), -1))

    def _head_norm(self, letter: str, values: torch.Tensor) -> torch.Tensor:
        name = f"self_attention.{letter}_layernorm"
        return self._one_norm(f"{name}.{{}}")(values, 0) if self._has(f"{name}.weight") else values

    def _attend_batch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        recipe, (rows, length) = self._recipe, ids.shape
        q, k, v = (x.reshape(rows, length, recipe.groups, -1, recipe.head_dim).permute(0, 2, 3, 1, 4) for x in (q, k, v))  # (B, G, R, S, D)
        if recipe.rotary:
            cos, sin = recipe.rotations(length)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        scores = q @ k.transpose(-1, -2) / recipe.head_dim**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        out: torch.Tensor = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return out.permute(0, 3, 1, 2, 4).reshape(rows * length, -1)

    def _mlp(self, name: str, norm: Norm, x_NH: torch.Tensor) -> torch.Tensor:
        return self._rows(f"{name}.linear_fc2", [self._activate(part) for part in self._columns(f"{name}.linear_fc1", norm, x_NH)])

    def _activate(self, part: torch.Tensor) -> torch.Tensor:
        if not self._recipe.is_gated:
            return self._recipe.activation(part)
        gate, up = part.chunk(2, -1)  # each rank has its gate rows above its up rows
        return self._recipe.activation(gate) * up

    def _mix(self, x_NH: torch.Tensor) -> torch.Tensor:
        chosen_NK, weights_NK = self._route(x_NH)
        total = torch.zeros_like(x_NH)
        for expert in self._experts():
            tokens, slots = (chosen_NK == expert).nonzero(as_tuple=True)
            if len(tokens):
                out = self._mlp(f"mlp.experts.local_experts.{expert}", _as_it_is, x_NH[tokens])
                total.index_add_(0, tokens, out * weights_NK[tokens, slots, None])
        if self._has("mlp.shared_experts.linear_fc1.weight"):
            shared = self._mlp("mlp.shared_experts", _as_it_is, x_NH)
            gates = self._read("mlp.shared_experts.gate_weight")
            total = total + (shared * torch.sigmoid(x_NH @ gates[0].T) if gates else shared)
        return total

    def _route(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recipe = self._recipe
        scores_NE = x_NH @ self._read("mlp.router.weight")[0].T
        if scores_NE.shape[1] != len(self._experts()):
            raise FormatError(f"a router for {scores_NE.shape[1]} experts, of which {len(self._experts())} are stored", where=self._prefix)
        if recipe.softmax_first:
            weights, chosen = scores_NE.softmax(-1).topk(recipe.topk)
        else:
            best, chosen = scores_NE.topk(recipe.topk)
            weights = best.softmax(-1)
        return chosen, weights * recipe.router_scale

    def _experts(self) -> list[int]:
        names = self._stage.names(f"{self._prefix}mlp.experts.local_experts.")
        return sorted({int(name.partition(".")[0]) for name in names})


def _as_it_is(x: torch.Tensor, _rank: int) -> torch.Tensor:
    return x


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # The first dims of each head, half against half.
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)
