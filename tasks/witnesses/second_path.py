"""Witness *second path*: the released values, derived a second time from the source's own files.

It takes the plan as JSON (so it knows which box of which source tensor feeds which target), decodes the source with `sources`, applies the
plan's operation in its own way, and yields each target in small pieces. It proves reading, moving, casting and writing; it does not
prove the mapping, which it takes from the plan.

Schema of the plan: "shardwright.plan/1", written by the planner. A target is op(its inputs' boxes, one below the other) in the source's
dtype; the cast to the released dtype is the caller's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from reports.errors import CoverageError, UnmappedError
from tasks.witnesses.boxes import Box, Ints, StoredBox, overlaps
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.sources import Stored, decode_masters, decode_source

PLAN_SCHEMA = "shardwright.plan/1"


@dataclass(frozen=True, slots=True)
class Feed:
    """The box of one source tensor that a target takes."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Target:
    """One released tensor as the plan describes it. `dtype` is the safetensors code to be written."""

    name: str
    shape: Ints
    dtype: str
    feeds: tuple[Feed, ...]
    op: str
    head_dim: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a target and its values, in the source's dtype."""

    box: Box
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Patch:
    # A box of the target and where its values are: from `at` of a stored box, every `step`-th row; rows are on dim `lead`, and the dims
    # before it have length one and are absent from the target.
    box: Box
    stored: StoredBox
    at: Ints
    lead: int
    step: int = 1
    turned: bool = False  # `box` is of the transposed target: its rows are the stored columns


class SecondPath:
    """The witness. Instances hold no open file and may be used from several threads.

    Args:
        plan_path: the plan, as JSON.
        source_roots: the source's folders, the main one first.

    Raises:
        NotHeardError: not a plan of this schema, or a source this witness cannot decode.
        FormatError: the source is damaged.
    """

    name = "second path"

    def __init__(self, plan_path: Path, source_roots: tuple[Path, ...]) -> None:
        plan = json.loads(plan_path.read_text(encoding="utf-8"))
        if plan.get("schema") != PLAN_SCHEMA:
            raise NotHeardError(f"plan schema {plan.get('schema')!r}, this witness reads {PLAN_SCHEMA!r}", where=str(plan_path))
        self.targets: Mapping[str, Target] = {t["name"]: _parse_target(t) for file in plan["files"] for t in file["tensors"]}
        self.source_format: str = plan["source"]["format"]
        self.of_masters: bool = plan["source"].get("weights") == "master"
        self._stored: Stored = self._decode(source_roots)

    def _decode(self, source_roots: tuple[Path, ...]) -> Stored:
        return (decode_masters if self.of_masters else decode_source)(self.source_format, source_roots)

    def pieces(self, name: str, max_numel: int, *, rows: tuple[int, int] | None = None) -> Iterator[Piece]:
        """Yield a target's values in pieces that tile it.

        Args:
            name: a key of `targets`.
            max_numel: no piece has more elements.
            rows: only dim-0 rows from the first to before the second; None for all.

        Yields:
            Pieces; grouped by where they are stored, not in order.

        Raises:
            UnmappedError: the source has no such tensor.
            CoverageError: its boxes leave a hole, or overlap.
            FormatError: the stored bytes are damaged.
        """
        target = self.targets[name]
        for patch in self._patches(target):
            window = patch if rows is None else _between(patch, *rows)
            if window is not None:
                yield from _read_patch(window, max_numel)

    def _patches(self, target: Target) -> list[_Patch]:
        if target.op not in _OPS:
            raise NotHeardError(f"no second implementation of operation {target.op!r}", where=target.name)
        patches, row = [], 0
        for feed in target.feeds:
            found = self._feed_patches(target, feed, row)
            patches += found
            lead = len(feed.box.shape) - len(target.shape)
            row += feed.box.shape[lead] if target.shape else 0
        patches = [moved for patch in patches for moved in _OPS[target.op](patch, target.head_dim)]
        boxes = [patch.box for patch in patches]
        whole = Box((0,) * len(target.shape), target.shape)
        if sum(box.numel for box in boxes) != whole.numel or overlaps(boxes) or any(box.meet(whole) != box for box in boxes):
            raise CoverageError(
                "what the source holds does not tile this tensor", where=target.name, remedy="Restore the missing shards and run again."
            )
        return patches

    def _feed_patches(self, target: Target, feed: Feed, row: int) -> list[_Patch]:
        if feed.name not in self._stored:
            raise UnmappedError("the second path does not find this source tensor", where=target.name, missing=[feed.name])
        lead = len(feed.box.shape) - len(target.shape)
        if lead < 0 or any(n != 1 for n in feed.box.shape[:lead]):
            raise CoverageError(f"box {feed.box.shape} of {feed.name} does not fit shape {target.shape}", where=target.name)
        patches = []
        for stored in self._stored[feed.name]:
            met = stored.box.meet(feed.box)
            if met is not None:
                moved = [a - b for a, b in zip(met.offset[lead:], feed.box.offset[lead:], strict=True)]
                if moved:
                    moved[0] += row
                at = tuple(a - b for a, b in zip(met.offset, stored.box.offset, strict=True))
                patches.append(_Patch(Box(tuple(moved), met.shape[lead:]), stored, at, lead))
        return patches


def _same(patch: _Patch, _head_dim: int) -> Iterator[_Patch]:
    yield patch


def _rope_to_halves(patch: _Patch, head_dim: int) -> Iterator[_Patch]:
    # Rows 2i and 2i+1 of a head are rotated together in the source; the release keeps all first partners, then all second ones. So the
    # even rows of a head are one box of the target, and the odd rows another.
    first, stop = patch.box.offset[0], patch.box.offset[0] + patch.box.shape[0]
    for head in range(first // head_dim, -(-stop // head_dim)):
        low, high = max(first, head * head_dim), min(stop, (head + 1) * head_dim)
        for parity in (0, 1):
            row = low + (low + parity - head * head_dim) % 2
            count = len(range(row, high, 2))
            if count:
                to = head * head_dim + parity * (head_dim // 2) + (row - head * head_dim) // 2
                box = Box((to, *patch.box.offset[1:]), (count, *patch.box.shape[1:]))
                yield _Patch(box, patch.stored, _moved(patch.at, patch.lead, row - first), patch.lead, 2)


def _transpose(patch: _Patch, _head_dim: int) -> Iterator[_Patch]:
    yield replace(patch, box=Box(patch.box.offset[::-1], patch.box.shape[::-1]), turned=True)


# The plan's operations, as this witness understands them.
_OPS: Mapping[str, Callable[[_Patch, int], Iterator[_Patch]]] = {
    "same": _same,
    "rope_to_halves": _rope_to_halves,
    "transpose": _transpose,
}


def _between(patch: _Patch, start: int, stop: int) -> _Patch | None:
    if not patch.box.shape:
        return patch
    met = patch.box.meet(Box((start, *patch.box.offset[1:]), (stop - start, *patch.box.shape[1:])))
    if met is None:
        return None
    skipped = (met.offset[0] - patch.box.offset[0]) * patch.step
    return replace(patch, box=met, at=_moved(patch.at, 1 if patch.turned else patch.lead, skipped))


def _moved(at: Ints, dim: int, by: int) -> Ints:
    return (*at[:dim], at[dim] + by, *at[dim + 1 :])


def _read_patch(patch: _Patch, max_numel: int) -> Iterator[Piece]:
    ones = (1,) * patch.lead
    with patch.stored.open() as read:
        for part in patch.box.cut(max_numel):
            inside = [a - b for a, b in zip(part.offset, patch.box.offset, strict=True)]
            extent = list(part.shape)
            if inside:
                inside[0] *= patch.step
                extent[0] = (extent[0] - 1) * patch.step + 1
            if patch.turned:
                at = tuple(a + b for a, b in zip(patch.at, reversed(inside), strict=True))
                yield Piece(part, read(at, tuple(extent[::-1])).T)
                continue
            at = tuple(a + b for a, b in zip(patch.at, (*(0,) * patch.lead, *inside), strict=True))
            values = read(at, (*ones, *extent)).reshape(extent)
            yield Piece(part, values[:: patch.step] if inside else values)


def _parse_target(entry: Mapping[str, object]) -> Target:
    op = entry["op"]
    assert isinstance(op, dict)
    inputs = entry["inputs"]
    assert isinstance(inputs, list)
    feeds = tuple(Feed(i["name"], Box(tuple(i["offset"]), tuple(i["shape"]))) for i in inputs)
    shape = entry["shape"]
    assert isinstance(shape, list)
    return Target(str(entry["name"]), tuple(shape), str(entry["dtype"]), feeds, op["name"], int(op.get("head_dim", 0)))
