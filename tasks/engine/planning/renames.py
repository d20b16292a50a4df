"""Second planning step: every source tensor is consumed once, dropped for a reason, or an alias; every target is produced once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reports.errors import RequestError, ShapeError, UnmappedError, name_some
from tasks.engine.planning.merge import Model
from tasks.engine.planning.plan import Alias, Dropped, Input
from tasks.engine.tensors.ops import OpCall, Piece, Shape
from tasks.engine.tensors.region import check_tiling
from tasks.engine.tensors.rules import Drop
from validators.expectation import TensorSpec
from validators.layouts import TELLING_SUFFIXES


@dataclass(frozen=True, slots=True)
class Draft:
    """A target and what feeds it, before it has a dtype and a place."""

    name: str
    shape: Shape
    inputs: tuple[Input, ...]
    op: OpCall


@dataclass(frozen=True, slots=True)
class Tie:
    """A tied pair of published names. `keep_alias` writes the second one as well."""

    kept: str
    alias: str
    keep_alias: bool


@dataclass(frozen=True, slots=True)
class Renamed:
    """The result: drafts in the released order, aliases and drops."""

    drafts: tuple[Draft, ...]
    aliases: tuple[Alias, ...]
    dropped: tuple[Dropped, ...]


def plan_renames(
    sources: Mapping[str, TensorSpec], names: Sequence[str], model: Model, tie: Tie | None, given_up: frozenset[str]
) -> Renamed:
    """Map source tensors to released ones.

    Args:
        sources: specs by source name.
        names: all source names that are not dropped on request, also those without a shape.
        model: naming, released shapes (empty: any name is a target) and sizes.
        tie: the tied pair, when the config ties them.
        given_up: targets that need not be produced, because their source was dropped on request.

    Returns:
        What is written from what, in the order of `model.shapes`, or of the sources where there are none.

    Raises:
        UnmappedError: sources no rule takes, or targets nothing feeds; both lists together.
        ShapeError: targets whose shape differs from the config's, or a tied head whose shape is not the embedding's.
        RequestError: of a tied pair, only the kept one is dropped.
    """
    drafts: dict[str, Draft] = {}
    heads: list[str] = []
    dropped: list[Dropped] = []
    phantom: list[str] = []
    for name in names:
        match = model.naming.match(name)
        if match is None:
            phantom.append(name)
        elif isinstance(match.row, Drop):
            dropped.append(Dropped(name, match.row.because, "rule"))
        elif tie is not None and match.targets == (tie.alias,) and not tie.keep_alias:
            heads.append(name)
        elif name in sources:
            pieces = match.row.op.pieces(name, sources[name].shape, match.targets, model.sizes)
            _check_exhaustive(sources[name], pieces)
            dropped += [_left_out(sources[name], piece) for piece in pieces if not piece.target]
            for piece in pieces:
                if piece.target:
                    _add(drafts, _draft(sources[name], piece))
    if tie is not None and tie.keep_alias and tie.kept in drafts and tie.alias not in drafts:
        kept = drafts[tie.kept]
        drafts[tie.alias] = Draft(tie.alias, kept.shape, kept.inputs, kept.op)
    wanted = [name for name in (model.shapes or drafts) if name in drafts or name not in given_up]
    missing = [name for name in wanted if name not in drafts]
    phantom += [d.inputs[0].name for name, d in drafts.items() if model.shapes and name not in model.shapes]
    if missing or phantom:
        raise _unmapped(missing, phantom, model)
    _check_shapes(drafts, model)
    return Renamed(tuple(drafts[name] for name in wanted), _aliases(heads, sources, drafts, tie), tuple(dropped))


def _left_out(source: TensorSpec, piece: Piece) -> Dropped:
    return Dropped(f"{source.fqn} {', '.join(box.rows(source.shape) for box in piece.boxes)}", piece.because, "rule")


def _draft(source: TensorSpec, piece: Piece) -> Draft:
    inputs = tuple(Input(source.fqn, box.offset, box.shape, source.dtype, source.shape) for box in piece.boxes)
    return Draft(piece.target, piece.shape, inputs, piece.call)


def _add(drafts: dict[str, Draft], draft: Draft) -> None:
    if draft.name in drafts:
        raise UnmappedError(
            f"fed twice, by {drafts[draft.name].inputs[0].name} and {draft.inputs[0].name}",
            where=draft.name,
            remedy="Leave one of them out with --drop NAME=REASON.",
        )
    drafts[draft.name] = draft


def _check_exhaustive(source: TensorSpec, pieces: Sequence[Piece]) -> None:
    boxes = [box for piece in pieces for box in piece.boxes]
    if len(boxes) > 1:
        check_tiling(source.fqn, source.shape, np.array([b.offset for b in boxes]), np.array([b.shape for b in boxes]))


def _aliases(heads: Sequence[str], sources: Mapping[str, TensorSpec], drafts: Mapping[str, Draft], tie: Tie | None) -> tuple[Alias, ...]:
    if tie is None or not heads:
        return ()
    because = f"tie_word_embeddings: {tie.alias} is {tie.kept}"
    if tie.kept not in drafts:
        raise RequestError(
            f"is the only copy of {tie.kept} once that is dropped", where=heads[0], remedy=f"Drop both or neither ({because})."
        )
    kept = drafts[tie.kept].inputs[0]
    for head in heads:
        if head in sources and sources[head].shape != kept.full_shape:
            raise ShapeError(
                f"has shape {sources[head].shape}, {kept.name} {kept.full_shape}; {because}",
                where=head,
                remedy="If the head was trained apart, set tie_word_embeddings to false in the config given with --assets.",
            )
    return tuple(Alias(head, kept.name, because) for head in heads)


def _unmapped(missing: Sequence[str], phantom: Sequence[str], model: Model) -> UnmappedError:
    quantized = [name for name in phantom if name.rpartition(".")[2] in TELLING_SUFFIXES]
    if quantized:
        return UnmappedError(
            f"is quantized: it holds {name_some(quantized)}.",
            where="the source",
            remedy="Give the unquantized weights it was made from. A gate compares a release with a quantized one by --weights retrained.",
            missing=missing,
            phantom=phantom,
        )
    parts = []
    if phantom:
        parts.append(f"no rule maps {len(phantom)} source tensors: {name_some(phantom)}")
    if missing:
        parts.append(f"no source feeds {len(missing)} released tensors: {name_some(missing)}")
    return UnmappedError(
        "; ".join(parts) + ".",
        where=f"family {model.family}, naming {model.naming.name}",
        remedy="Give the config.json of this very model; leave a tensor out on purpose with --drop PATTERN=REASON; or teach the family"
        " a Rule or Drop in tasks/engine/families.",
        missing=missing,
        phantom=phantom,
    )


def _check_shapes(drafts: Mapping[str, Draft], model: Model) -> None:
    wrong = [(name, draft) for name, draft in drafts.items() if model.shapes and draft.shape != model.shapes[name]]
    if wrong:
        name, draft = wrong[0]
        others = f" So have {name_some(n for n, _ in wrong[1:])}." if len(wrong) > 1 else ""
        raise ShapeError(
            f"has shape {draft.shape} in the checkpoint, the config implies {model.shapes[name]}.{others}",
            where=name,
            remedy="Give the config.json of this very model with --assets.",
        )
