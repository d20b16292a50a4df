"""Which parameters the buckets of a `dp_reshardable` optimizer hold (torch_dist's default since core 0.15). No tensor byte is read.

Every tensor- and pipeline-parallel rank has its own buckets, in the order of megatron_flat; each is one flat tensor without the padding
behind it, and each piece of a parameter, and each gap between two, is a chunk of its own. The model's tensors are global there, so what
each rank holds is rebuilt: its layers are counted by what fits into its buckets, its share of each parameter is megatron_cuts', the
order the model's (megatron_order). It is taken only where every bucket is filled exactly and every parameter begins and ends with a chunk;
else the buckets are listed, with the reason.

Not decoded: models with experts, whose order no recorded file shows; prediction layers; layers of several kinds; several dtypes.

Source: Megatron-LM core 0.15 to main, megatron/core/optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`); groups are
numbered over tp first, then over pp.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from reports.errors import RequestError
from tasks.engine.formats.dcp_metadata import SavedTensor
from tasks.engine.formats.megatron_args import Layout
from tasks.engine.formats.megatron_cuts import share_of
from tasks.engine.formats.megatron_flat import ALIGNMENT
from tasks.engine.formats.megatron_order import EMBEDDING, FIRST, HEAD, LAST, LAYER, place_in_model
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.tensors.flat import boxes_of_range
from tasks.engine.tensors.region import Region

BUCKET = re.compile(
    r"^optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(([^)]*)\)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)$"
)
_SLOTS: Mapping[str, str] = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_FUSED = (  # what Transformer Engine fuses, as torch_dist always calls it → as the local implementation orders it
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
_SPECS = ("local", "transformer_engine")
Shape = tuple[int, ...]


class UnfitError(Exception):
    """What is stored does not fit the order rebuilt from names."""


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A rank's part of a parameter in one bucket: from element `start` on, the `boxes` of the whole, joined on dim 0."""

    item: SavedTensor
    start: int
    boxes: tuple[Region, ...]

    def rows(self) -> Iterator[tuple[tuple[int, ...], Region, int]]:
        """Yield what each chunk holds of it.

        Yields:
            The chunk's offset, a box of the whole, and the chunk's element at which the box begins.
        """
        local = (sum(box.shape[0] for box in self.boxes), *self.boxes[0].shape[1:])
        for (first,), (length,) in self.item.chunks:
            begin, end = max(first - self.start, 0), min(first + length - self.start, prod(local))
            element = max(self.start - first, 0)
            for box in boxes_of_range(local, begin, end) if begin < end else ():
                for part in _split(box, self.boxes):
                    yield (first,), part, element
                    element += part.numel


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One slot of one parameter: the whole's shape, and the pieces of all ranks."""

    shape: Shape
    pieces: list[FlatPiece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Buffer:
    # The buckets of one rank's virtual stage, by slot.
    buckets: Mapping[str, Sequence[SavedTensor]]

    @property
    def lengths(self) -> list[int]:
        return [item.shape[0] for item in self.buckets["param"]]


def find_flat_slots(
    items: Mapping[str, SavedTensor], model: Mapping[str, Shape], args: Mapping[str, object], layout: Layout | None
) -> dict[str, FlatTensor]:
    """Return where the buckets hold each parameter's master and moments.

    Args:
        items: the save's tensors, by key.
        model: shapes of the model's tensors, by global name.
        args: the run's arguments.
        layout: what they state; None where there are none.

    Returns:
        Key of `Catalog.state_tensors` → where it is.

    Raises:
        UnfitError: the buckets are not what the model's names and args imply.
    """
    if layout is None or EMBEDDING not in model:
        raise UnfitError("no args say how the run was cut, or no embedding is stored")
    buffers = _buffers(items, layout, _stages(args))
    names = sorted(model, key=lambda name: place_in_model(_as_ordered(name, args)))
    layers = _same_layers(names)
    shapes = {**model, HEAD: model.get(HEAD, model[EMBEDDING])}
    outside = [name for name in names if not LAYER.match(name)]
    last = (layout.pp - 1, _stages(args) - 1)
    shared = [HEAD] if HEAD not in model and layout.pp > 1 else []  # the last stage's copy of a tied embedding
    made: dict[str, FlatTensor] = {}
    first_layer = 0
    for chunk in range(_stages(args)):
        for pp in range(layout.pp):
            before = [name for name in outside if name.startswith(FIRST) and (pp, chunk) == (0, 0)]
            behind = [name for name in [*outside, *shared] if name.startswith(LAST) and (pp, chunk) == last]
            count = -1
            for tp in range(layout.tp):
                buffer = buffers[tp + layout.tp * pp, chunk]
                count, filled = _fill(buffer.lengths, before, layers, first_layer, behind, _Cut(shapes, tp, layout.tp), count)
                for name, (bucket, start) in filled.items():
                    if name in model:
                        _place(made, name, buffer, bucket, start, _Cut(shapes, tp, layout.tp))
            first_layer += count
    if first_layer != len(layers):
        raise UnfitError(f"the buckets hold {first_layer} layers, the model {len(layers)}")
    return made


@dataclass(frozen=True, slots=True)
class _Cut:
    # One tensor-parallel rank's shares of whole tensors.
    shapes: Mapping[str, Shape]
    rank: int
    ranks: int

    def boxes(self, name: str) -> tuple[Region, ...]:
        try:
            return share_of(name, self.shapes, self.rank, self.ranks)
        except RequestError as error:
            raise UnfitError(error.what) from None

    def numel(self, name: str) -> int:
        return sum(box.numel for box in self.boxes(name))


def _stages(args: Mapping[str, object]) -> int:
    value = args.get("virtual_pipeline_model_parallel_size")
    return value if isinstance(value, int) else 1


def _as_ordered(name: str, args: Mapping[str, object]) -> str:
    spec = args.get("transformer_impl")
    if spec not in _SPECS:
        raise UnfitError(f"args say transformer_impl={spec!r}, whose order of parameters is not known")
    for fused, apart in _FUSED if spec == "local" else ():
        name = name.replace(fused, apart)
    return name


def _buffers(items: Mapping[str, SavedTensor], layout: Layout, stages: int) -> dict[tuple[int, int], _Buffer]:
    found: dict[tuple[int, int], dict[str, dict[int, SavedTensor]]] = {}
    dtypes: dict[tuple[int, int], str] = {}
    for key, item in items.items():
        match = BUCKET.match(key)
        if match is None:
            continue
        place = int(match[1]), int(match[2])
        if dtypes.setdefault(place, match[3]) != match[3]:
            raise UnfitError(f"several dtypes in group {place[0]}")
        found.setdefault(place, {}).setdefault(match[5], {})[int(match[4])] = item
    wanted = {(group, chunk) for group in range(layout.tp * layout.pp) for chunk in range(stages)}
    if found.keys() != wanted:
        raise UnfitError(
            f"buckets of {len(found)} buffers, the run has {len(wanted)}: tp={layout.tp}, pp={layout.pp}, {stages} stages each"
        )
    made = {}
    for place, slots in found.items():
        shapes = {slot: [(number, slots[slot][number].shape) for number in sorted(slots[slot])] for slot in slots}
        numbers = [number for number, _ in shapes.get("param", [])]
        if (
            slots.keys() != _SLOTS.keys()
            or numbers != list(range(len(numbers)))
            or any(held != shapes["param"] for held in shapes.values())
        ):
            raise UnfitError(f"group {place[0]} does not hold the same buckets of {', '.join(_SLOTS)}")
        made[place] = _Buffer({slot: [held[number] for number in sorted(held)] for slot, held in slots.items()})
    return made


def _same_layers(names: Sequence[str]) -> list[list[str]]:
    # The names of each layer, in order; all layers must have the same.
    layers: dict[int, list[str]] = {}
    for name in names:
        match = LAYER.match(name)
        if match:
            layers.setdefault(int(match[1]), []).append(name)
    kinds = {tuple(LAYER.sub("", name) for name in held) for held in layers.values()}
    if len(kinds) != 1 or sorted(layers) != list(range(len(layers))) or any(".mlp.router." in name for name in names):
        raise UnfitError("layers of several kinds, or with experts")
    return [layers[number] for number in sorted(layers)]


def _fill(
    lengths: Sequence[int],
    before: Sequence[str],
    layers: Sequence[Sequence[str]],
    first_layer: int,
    behind: Sequence[str],
    cut: _Cut,
    count: int,
) -> tuple[int, dict[str, tuple[int, int]]]:
    # As many layers as fill the buckets exactly: `count`, or any number where it is -1.
    for number in range(len(layers) - first_layer + 1) if count < 0 else (count,):
        held = [name for layer in layers[first_layer : first_layer + number] for name in layer]
        filled = _walk(lengths, [*before, *held, *behind], cut)
        if filled is not None:
            return number, filled
    raise UnfitError(f"no number of layers fills buckets of {', '.join(map(str, lengths))} elements exactly")


def _walk(lengths: Sequence[int], names: Sequence[str], cut: _Cut) -> dict[str, tuple[int, int]] | None:
    # Bucket and first element of each; None where the buckets are not filled exactly.
    bucket, at, found = 0, 0, {}
    for name in reversed(names):
        aligned = -(-at // ALIGNMENT) * ALIGNMENT
        if at and lengths[bucket] in (at, aligned):  # an embedding's own bucket begins aligned
            bucket, aligned = bucket + 1, 0
        at = aligned + cut.numel(name)
        if bucket >= len(lengths) or at > lengths[bucket]:
            return None
        found[name] = bucket, aligned
    return found if bucket == len(lengths) - 1 and at == lengths[bucket] else None


def _place(made: dict[str, FlatTensor], name: str, buffer: _Buffer, bucket: int, start: int, cut: _Cut) -> None:
    boxes, end = cut.boxes(name), start + cut.numel(name)
    for slot, items in buffer.buckets.items():
        item = items[bucket]
        edges = {item.shape[0], *(first for (first,), _ in item.chunks)}
        if not {start, end} <= edges:
            raise UnfitError(f"{name} would lie at {start} to {end} of {item.key}, whose chunks are cut elsewhere")
        held = made.setdefault(slot_key(_SLOTS[slot], name), FlatTensor(cut.shapes[name]))
        if not (held.pieces and boxes[0] == Region.whole(held.shape)):  # what every rank holds is taken once
            held.pieces.append(FlatPiece(item, start, boxes))


def _split(box: Region, boxes: Sequence[Region]) -> Iterator[Region]:
    # A box of the joined part, as boxes of the whole.
    first = 0
    for whole in boxes:
        begin, end = max(box.offset[0], first), min(box.offset[0] + box.shape[0], first + whole.shape[0])
        if begin < end:
            rest = tuple(a + b for a, b in zip(whole.offset[1:], box.offset[1:], strict=True))
            yield Region((whole.offset[0] + begin - first, *rest), (end - begin, *box.shape[1:]))
        first += whole.shape[0]
