"""The closed set of operations a rule may name.

An op maps one source tensor to its targets. Planning asks for *pieces*: which box of the source feeds which target. Every op's pieces
tile the source, so that nothing of it is lost. What is left to do on values is an `OpCall`, and it is *row-local*: applied to a band of
rows that starts and ends on a multiple of `band_rows`, it gives that band of the result. So no tensor is ever held whole.

To add one: a class with `pieces` and `source_shape`, a row in `APPLY` if values change, and a property test in
tests/property/test_ops.py (it runs on every class of `OPS`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from reports.errors import ShapeError
from tasks.engine.tensors.region import Region

Shape = tuple[int, ...]
Raw = npt.NDArray[np.unsignedinteger]  # values as unsigned integers of their width: moves need no float dtype
EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class OpCall:
    """What is done to the values of a box. `head_dim` belongs to RoPE ops, 0 elsewhere."""

    name: Literal["same", "rope_to_halves", "rope_to_pairs", "transpose"] = "same"
    head_dim: int = 0

    @property
    def band_rows(self) -> int:
        """Rows that must stay together."""
        return self.head_dim or 1

    @property
    def band_dim(self) -> int:
        """Dim of the joined boxes whose bands give bands of the result's rows."""
        return 1 if self.name == "transpose" else 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One target of an op: the `boxes` of the source that feed it, joined on their dim 0, and what is done to the values.

    Without a target, the boxes are left out of the release, and `because` says why.
    """

    target: str
    boxes: tuple[Region, ...]
    shape: Shape
    call: OpCall = OpCall()
    because: str = ""


class Op(Protocol):
    """One way a source tensor becomes targets."""

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        """Return the targets and the boxes that feed them.

        Args:
            source: the source's name, for messages.
            shape: the source's shape.
            targets: the rule's target names, layer filled in.
            sizes: the model's sizes by name ("head_dim", "num_experts").

        Returns:
            Pieces that tile the source.

        Raises:
            ShapeError: the source's shape does not fit the op.
        """

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        """Return the shape a source must have: the op's inverse, on shapes.

        Args:
            shapes: one shape per target of the rule.
            sizes: the model's sizes by name.

        Returns:
            The source's shape.
        """


@dataclass(frozen=True, slots=True)
class Same:
    """The target is the source."""

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        (target,) = targets
        return (Piece(target, (Region.whole(shape),), shape),)

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        (shape,) = shapes
        return shape


@dataclass(frozen=True, slots=True)
class RopeToHalves:
    """Rows of each head go from rotary pairs (0,1), (2,3) … to the halves (0, d/2), (1, d/2+1) … that transformers' Llama rotates.

    Source: torchtitan 0.3 models/llama3 state dict adapter; meta-llama weights have the same layout.
    """

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        (target,) = targets
        head_dim = sizes["head_dim"]
        if head_dim % 2 or not shape or shape[0] % head_dim:
            raise ShapeError(f"{shape} cannot be cut into heads of {head_dim} rows", where=source, remedy="Check head_dim in config.json.")
        return (Piece(target, (Region.whole(shape),), shape, OpCall("rope_to_halves", head_dim)),)

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        (shape,) = shapes
        return shape


@dataclass(frozen=True, slots=True)
class Unstack:
    """One stacked tensor (E, P*N, …) becomes, for each of E experts, P targets (N, …): the parts lie one after the other on dim 1.

    Every target name holds `{expert}`; P is the number of targets.
    """

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        parts = len(targets)
        if len(shape) < 2 or shape[1] % parts:
            raise ShapeError(f"{shape} cannot be cut into {parts} equal parts on dim 1", where=source, remedy="Check config.json.")
        if shape[0] != sizes["num_experts"]:
            raise ShapeError(
                f"holds {shape[0]} experts, the config says {sizes['num_experts']}", where=source, remedy="Give the matching config.json."
            )
        rows, rest = shape[1] // parts, shape[2:]
        zeros = (0,) * len(rest)
        return tuple(
            Piece(target.replace(EXPERT, str(expert)), (Region((expert, part * rows, *zeros), (1, rows, *rest)),), (rows, *rest))
            for expert in range(shape[0])
            for part, target in enumerate(targets)
        )

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        first = shapes[0]
        return (sizes["num_experts"], first[0] * len(shapes), *first[1:])


@dataclass(frozen=True, slots=True)
class SplitQkv:
    """A fused (G*(R+2)*D, …) weight becomes Q (G*R*D, …), K and V (G*D, …): per query group come R query heads, one K, one V.

    G is num_kv_heads, R*G num_heads, D head_dim. `rope_pairs` says that Q and K rows are rotary pairs (see RopeToHalves).
    Source: torchtitan 0.3 qkv_linear.wqkv, layout [n_kv, R + 2, head_dim, dim].
    """

    rope_pairs: bool

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        groups, head_dim = sizes["num_kv_heads"], sizes["head_dim"]
        per_group = sizes["num_heads"] // groups
        if not shape or shape[0] != groups * (per_group + 2) * head_dim:
            raise ShapeError(f"{shape} is not {groups} groups of {per_group} + 2 heads of {head_dim} rows", where=source)
        rotated = OpCall("rope_to_halves", head_dim) if self.rope_pairs else OpCall()
        cuts = ((0, per_group, rotated), (per_group, 1, rotated), (per_group + 1, 1, OpCall()))
        zeros, rest = (0,) * (len(shape) - 1), shape[1:]
        made = []
        for target, (head, heads, call) in zip(targets, cuts, strict=True):
            rows = heads * head_dim
            starts = [(group * (per_group + 2) + head) * head_dim for group in range(groups)]
            boxes = tuple(Region((start, *zeros), (rows, *rest)) for start in starts)
            made.append(Piece(target, boxes, (groups * rows, *rest), call))
        return tuple(made)

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True, slots=True)
class CutRows:
    """The target is the first rows of the source, as many as the model's size of that name; the rows behind them are padding.

    Source: Megatron pads the vocabulary until tensor parallelism divides it, megatron/training/tokenizer (`vocab_size_with_padding`).
    """

    size: str

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        (target,) = targets
        rows = sizes[self.size]
        if not shape or shape[0] < rows:
            raise ShapeError(
                f"{shape} has fewer rows than the config's {self.size} size {rows}",
                where=source,
                remedy="Give the matching config.json.",
                code="source.vocabulary-short",
            )
        zeros, rest = (0,) * (len(shape) - 1), shape[1:]
        kept = Piece(target, (Region((0, *zeros), (rows, *rest)),), (rows, *rest))
        if shape[0] == rows:
            return (kept,)
        padding = Region((rows, *zeros), (shape[0] - rows, *rest))
        because = f"padding to {shape[0]} rows, which tensor parallelism divides; the model has {rows}"
        return (kept, Piece("", (padding,), padding.shape, because=because))

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        (shape,) = shapes
        return shape


@dataclass(frozen=True, slots=True)
class SplitRows:
    """P targets of equal size lie one behind the other on dim 0; P is the number of targets."""

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        parts = len(targets)
        if not shape or shape[0] % parts:
            raise ShapeError(f"{shape} cannot be cut into {parts} equal parts on dim 0", where=source, remedy="Check config.json.")
        rows, rest = shape[0] // parts, shape[1:]
        zeros = (0,) * len(rest)
        return tuple(Piece(target, (Region((at * rows, *zeros), (rows, *rest)),), (rows, *rest)) for at, target in enumerate(targets))

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        return (shapes[0][0] * len(shapes), *shapes[0][1:])


@dataclass(frozen=True, slots=True)
class Transpose:
    """The target is a matrix (in, out), the source (out, in): GPT-2's Conv1D against everyone's linear."""

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        (target,) = targets
        if len(shape) != 2:
            raise ShapeError(f"{shape} is not a matrix", where=source, remedy="Check config.json.")
        return (Piece(target, (Region.whole(shape),), shape[::-1], OpCall("transpose")),)

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        (shape,) = shapes
        return shape[::-1]


@dataclass(frozen=True, slots=True)
class JoinQkv:
    """A grouped (G*(R+2)*D, …) weight (see SplitQkv) becomes all Q rows, all K rows, all V rows; a matrix is transposed, as GPT-2's is."""

    def pieces(self, source: str, shape: Shape, targets: Sequence[str], sizes: Mapping[str, int]) -> tuple[Piece, ...]:
        (target,) = targets
        parts = SplitQkv(rope_pairs=False).pieces(source, shape, ("q", "k", "v"), sizes)
        boxes = tuple(box for part in parts for box in part.boxes)
        if len(shape) == 2:
            return (Piece(target, boxes, shape[::-1], OpCall("transpose")),)
        return (Piece(target, boxes, shape),)

    def source_shape(self, shapes: Sequence[Shape], sizes: Mapping[str, int]) -> Shape:
        (shape,) = shapes
        return shape[::-1]


OPS: tuple[type[Op], ...] = (Same, RopeToHalves, Unstack, SplitQkv, CutRows, SplitRows, Transpose, JoinQkv)


def _rope_to_halves(rows: Raw, head_dim: int) -> Raw:
    heads = rows.reshape(rows.shape[0] // head_dim, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _rope_to_pairs(rows: Raw, head_dim: int) -> Raw:
    # The inverse, as GGUF's llama has its rows.
    heads = rows.reshape(rows.shape[0] // head_dim, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


APPLY: Mapping[str, Callable[[Raw, int], Raw]] = {
    "same": lambda rows, _: rows,
    "rope_to_halves": _rope_to_halves,
    "rope_to_pairs": _rope_to_pairs,
    "transpose": lambda columns, _: columns.T,
}


def apply_op(call: OpCall, rows: Raw) -> Raw:
    """Return a band of the result.

    Args:
        call: what to do.
        rows: (n, …), n a multiple of `call.band_rows`; a band of columns (…, n) for a transposition. Any unsigned integer dtype.

    Returns:
        The same shape, or transposed; may be a view.
    """
    return APPLY[call.name](rows, call.head_dim)
