"""Which rank of a Megatron run holds what: a model's tensors dealt out over tensor, pipeline, virtual pipeline and expert ranks.

Stages take equal numbers of layers, or as many as are asked for, virtual stages in turn. A (tp, ep) pair has a file where a rank has it, so
that the grid may be sparse.

Source: Megatron-LM core 0.12 to main, megatron/training/checkpointing.py (`get_checkpoint_name`), megatron/core/parallel_state.py;
held against files that it wrote.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from reports.errors import RequestError
from tasks.engine.formats.megatron_cuts import is_expert, share_of
from tasks.engine.formats.megatron_order import EMBEDDING, FIRST, HEAD, LAST, LAYER, LOCAL_EXPERT, place_in_model
from tasks.engine.planning.invert import Inverse
from tasks.engine.tensors.ops import Shape
from tasks.engine.tensors.region import Region


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How a run is cut; `etp` are the tensor-parallel ranks of experts, `vpp` the virtual stages of each pipeline stage.

    `layers` are those of each stage, those of the first virtual stage before those of the second; empty for equal numbers.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    layers: tuple[int, ...] = ()

    def counts(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of each stage, those of the first virtual stage before those of the second.

        Args:
            num_layers: of the decoder.

        Returns:
            pp x vpp numbers.

        Raises:
            RequestError: they do not add up, or layers do not divide.
        """
        stages = self.pp * self.vpp
        if self.layers and (len(self.layers) != stages or sum(self.layers) != num_layers or min(self.layers) < 0):
            what = f"{len(self.layers)} stages with {sum(self.layers)} layers; the model has {num_layers}, the run {stages} stages"
            raise RequestError(what, where="--layers-per-stage", remedy="Give the layers of each stage: they must add up.")
        if not self.layers and num_layers % stages:
            remedy = "Choose a divisor, or say with --layers-per-stage what each takes."
            raise RequestError(f"{num_layers} layers do not divide over {stages} stages", where="--pp, --vpp", remedy=remedy)
        return self.layers or (num_layers // stages,) * stages

    @property
    def world(self) -> int:
        """The fewest processes of such a run."""
        return self.pp * lcm(self.tp, self.etp * self.ep)

    def files(self) -> tuple[tuple[int, int], ...]:
        """Return the (tp, ep) coordinates that have a file on each pipeline stage.

        Returns:
            Pairs, sorted.
        """
        ranks = range(lcm(self.tp, self.etp * self.ep))
        return tuple(sorted({(rank % self.tp, rank // self.etp % self.ep) for rank in ranks}))

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Return the name of a rank's folder.

        Args:
            tp: its coordinates.
            pp: likewise.
            ep: likewise.

        Returns:
            `mp_rank_TT[_PPP][_EEE]`.
        """
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a tensor: under which name of its own, and which boxes of the whole, joined on dim 0."""

    name: str
    boxes: tuple[Region, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the rank's tensor."""
        first = self.boxes[0].shape
        return (sum(box.shape[0] for box in self.boxes), *first[1:]) if first else ()


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One virtual stage: its tensors in order, and per (tp, ep) which share of each a rank holds; a rank without one has no entry."""

    tensors: tuple[Inverse, ...]
    shares: Mapping[tuple[int, int], Mapping[str, Share]]


def plan_ranks(
    model: Sequence[Inverse], layout: RankLayout, num_layers: int, num_experts: int, vocab_multiple: int
) -> dict[tuple[int, int], StagePlan]:
    """Return what each stage's ranks hold.

    Args:
        model: all tensors.
        layout: how to cut them.
        num_layers: of the decoder.
        num_experts: per layer; 0 without.
        vocab_multiple: the stored vocabulary is padded to a multiple of this times tp.

    Returns:
        (pipeline stage, virtual stage) → plan.

    Raises:
        RequestError: layers, experts or rows do not divide.
    """
    _refuse_uneven(layout, num_experts)
    padded = [_pad(tensor, vocab_multiple * layout.tp) for tensor in model]
    if layout.pp > 1 and not any(tensor.name == HEAD for tensor in padded):  # a tied model's last stage holds a copy
        first = next(tensor for tensor in padded if tensor.name == EMBEDDING)
        padded.append(Inverse(HEAD, first.shape, first.pieces))
    counts, at = layout.counts(num_layers), 0
    predicts = any(tensor.name.startswith("mtp.") for tensor in model)
    made = {}
    for chunk in range(layout.vpp):
        for pp in range(layout.pp):
            count = counts[chunk * layout.pp + pp]
            own = [t for t in padded if _is_of(t.name, range(at, at + count), (pp, chunk), layout)]
            if predicts and layout.pp > 1 and (pp, chunk) == (layout.pp - 1, layout.vpp - 1):  # prediction layers embed by themselves
                own += [t for t in padded if t.name == EMBEDDING]
            tensors = tuple(sorted(own, key=lambda tensor: place_in_model(tensor.name)))
            shapes = {tensor.name: tensor.shape for tensor in padded}
            shares = {pair: dict(_shares(tensors, shapes, pair, layout, at, num_experts)) for pair in layout.files()}
            made[pp, chunk] = StagePlan(tensors, shares)
            at += count
    return made


def refuse_heads(layout: RankLayout, num_heads: int, num_kv_heads: int) -> None:
    """Refuse a cut through attention heads: their rows may divide, but no run of Megatron has it.

    Args:
        layout: how a run is cut.
        num_heads: query heads.
        num_kv_heads: KV heads; several ranks may share one.

    Raises:
        RequestError: heads do not divide over tp.
    """
    if num_heads % layout.tp or (num_kv_heads % layout.tp and layout.tp % num_kv_heads):
        heads = f"{num_heads} heads and {num_kv_heads} KV heads"
        raise RequestError(f"{heads} do not divide over {layout.tp} ranks", where="--tp", remedy="Choose a divisor.")


def _refuse_uneven(layout: RankLayout, num_experts: int) -> None:
    if layout.vpp > 1 and layout.pp == 1:
        raise RequestError("virtual stages need more than one pipeline stage", where="--vpp", remedy="Give --pp as well.")
    if layout.ep > 1 and not num_experts:
        raise RequestError("the model has no experts", where="--ep", remedy="Leave it out.")
    if num_experts % layout.ep:
        raise RequestError(f"{num_experts} experts do not divide over {layout.ep} ranks", where="--ep", remedy="Choose a divisor.")


def _pad(tensor: Inverse, multiple: int) -> Inverse:
    if tensor.name not in (EMBEDDING, HEAD):
        return tensor
    rows = -(-tensor.shape[0] // multiple) * multiple
    return Inverse(tensor.name, (rows, *tensor.shape[1:]), tensor.pieces)


def _is_of(name: str, layers: range, place: tuple[int, int], layout: RankLayout) -> bool:
    match = LAYER.match(name)
    if match:
        return int(match[1]) in layers
    if name.startswith(FIRST):
        return place == (0, 0)
    return name.startswith(LAST) and place == (layout.pp - 1, layout.vpp - 1)


def _shares(
    tensors: Sequence[Inverse], shapes: Mapping[str, Shape], pair: tuple[int, int], layout: RankLayout, first_layer: int, num_experts: int
) -> Iterator[tuple[str, Share]]:
    tp, ep = pair
    per_rank = num_experts // layout.ep
    for tensor in tensors:
        local = LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) - first_layer}.", tensor.name)
        if not is_expert(tensor.name):
            yield tensor.name, Share(local, share_of(tensor.name, shapes, tp, layout.tp))
            continue
        match = LOCAL_EXPERT.search(local)
        assert match is not None
        own = int(match[1]) - ep * per_rank
        if 0 <= own < per_rank:
            local = f"{local[: match.start()]}.local_experts.{own}.{local[match.end() :]}"
            yield tensor.name, Share(local, share_of(tensor.name, shapes, tp % layout.etp, layout.etp))
