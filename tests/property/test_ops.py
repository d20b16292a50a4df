"""Every op of OPS: its pieces tile the source, and what they make is what torch makes by another formulation."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import ShapeError
from tasks.engine.planning.gguf import TO_PAIRS
from tasks.engine.tensors.ops import (
    APPLY,
    OPS,
    CutRows,
    JoinQkv,
    Op,
    OpCall,
    Piece,
    RopeToHalves,
    Same,
    SplitQkv,
    SplitRows,
    Transpose,
    Unstack,
    apply_op,
)


@dataclass(frozen=True)
class Case:
    """An op on a source of known values, and the targets torch makes of it."""

    op: Op
    targets: tuple[str, ...]
    sizes: dict[str, int]
    source: torch.Tensor
    truth: dict[str, torch.Tensor]


def _values(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape, dtype=int)), dtype=torch.int32).reshape(shape)


def _halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    # transformers' own permutation, from convert_llama_weights_to_hf
    heads = rows.shape[0] // head_dim
    return rows.view(heads, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@st.composite
def same(draw):
    source = _values(*draw(st.lists(st.integers(0, 4), max_size=3)))
    return Case(Same(), ("t",), {}, source, {"t": source})


@st.composite
def rope_to_halves(draw):
    head_dim, heads = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    source = _values(heads * head_dim, *draw(st.sampled_from([(), (3,), (2, 2)])))
    return Case(RopeToHalves(), ("t",), {"head_dim": head_dim}, source, {"t": _halves(source, head_dim)})


@st.composite
def unstack(draw):
    experts, parts, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source = _values(experts, parts * rows, *draw(st.sampled_from([(), (3,)])))
    targets = tuple(f"e.{{expert}}.p{part}" for part in range(parts))
    truth = {f"e.{e}.p{p}": piece for e in range(experts) for p, piece in enumerate(source[e].chunk(parts))}
    return Case(Unstack(), targets, {"num_experts": experts}, source, truth)


@st.composite
def split_qkv(draw):
    groups, per_group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    is_rope, rest = draw(st.booleans()), draw(st.sampled_from([(), (3,)]))
    source = _values(groups * (per_group + 2) * head_dim, *rest)
    view = source.view(groups, per_group + 2, head_dim, *rest)
    q, k, v = (part.reshape(-1, *rest) for part in view.split([per_group, 1, 1], dim=1))
    truth = {"q": _halves(q, head_dim), "k": _halves(k, head_dim), "v": v} if is_rope else {"q": q, "k": k, "v": v}
    sizes = {"num_heads": groups * per_group, "num_kv_heads": groups, "head_dim": head_dim}
    return Case(SplitQkv(rope_pairs=is_rope), ("q", "k", "v"), sizes, source, truth)


@st.composite
def cut_rows(draw):
    rows, padding = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    source = _values(rows + padding, *draw(st.sampled_from([(), (3,)])))
    left_out = {"": source[rows:]} if padding else {}
    return Case(CutRows("vocab"), ("t",), {"vocab": rows}, source, {"t": source[:rows]} | left_out)


@st.composite
def split_rows(draw):
    parts, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source = _values(parts * rows, *draw(st.sampled_from([(), (3,)])))
    targets = tuple(f"p{part}" for part in range(parts))
    return Case(SplitRows(), targets, {}, source, dict(zip(targets, source.chunk(parts), strict=True)))


@st.composite
def transpose(draw):
    source = _values(draw(st.integers(0, 4)), draw(st.integers(0, 4)))
    return Case(Transpose(), ("t",), {}, source, {"t": source.T.contiguous()})


@st.composite
def join_qkv(draw):
    split = draw(split_qkv().filter(lambda case: case.op == SplitQkv(rope_pairs=False)))
    joined = torch.cat([split.truth[part] for part in "qkv"])
    return Case(JoinQkv(), ("t",), split.sizes, split.source, {"t": joined.T.contiguous() if joined.ndim == 2 else joined})


CASES = {
    Same: same(),
    RopeToHalves: rope_to_halves(),
    Unstack: unstack(),
    SplitQkv: split_qkv(),
    CutRows: cut_rows(),
    SplitRows: split_rows(),
    Transpose: transpose(),
    JoinQkv: join_qkv(),
}
EVERY = st.one_of(*CASES.values())


def _pieces(case: Case) -> tuple[Piece, ...]:
    return case.op.pieces("source", tuple(case.source.shape), case.targets, case.sizes)


def _gather(case: Case, piece: Piece) -> np.ndarray:
    # The boxes joined on the target's dim 0; leading dims of length 1 are dropped to fit.
    raw = case.source.numpy().view(np.uint32)
    boxes = [raw[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))] for b in piece.boxes]
    return np.concatenate([b.reshape(b.shape[b.ndim - len(piece.shape) :]) for b in boxes]) if piece.shape else boxes[0]


def _take(rows: np.ndarray, piece: Piece, start: int, stop: int) -> np.ndarray:
    return rows[:, start:stop] if piece.call.band_dim else rows[start:stop]


def test_every_op_has_a_case():
    assert set(CASES) == set(OPS)


@given(EVERY)
def test_pieces_tile_the_source(case):
    count = np.zeros(case.source.shape, dtype=int)
    for piece in _pieces(case):
        for box in piece.boxes:
            count[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    assert (count == 1).all()


@given(EVERY)
def test_targets_are_what_torch_makes_of_the_source(case):
    made = {piece.target: apply_op(piece.call, _gather(case, piece)).view(np.int32) for piece in _pieces(case)}
    assert made.keys() == case.truth.keys()
    for name, want in case.truth.items():
        assert np.array_equal(made[name], want.numpy()), name


@given(EVERY)
def test_shapes_of_pieces_are_those_of_the_targets(case):
    assert {p.target: p.shape for p in _pieces(case)} == {name: tuple(value.shape) for name, value in case.truth.items()}


@given(EVERY)
def test_source_shape_inverts_the_pieces(case):
    if "" in case.truth:  # how much is left out, only the checkpoint tells
        return
    shapes = [tuple(case.truth[target.replace("{expert}", "0")].shape) for target in case.targets]
    assert case.op.source_shape(shapes, case.sizes) == tuple(case.source.shape)


@given(EVERY, st.data())
def test_bands_of_whole_units_give_the_bands_of_the_result(case, data):
    for piece in _pieces(case):
        if not piece.shape:
            continue
        rows, whole = _gather(case, piece), apply_op(piece.call, _gather(case, piece))
        length = rows.shape[piece.call.band_dim]
        units = length // piece.call.band_rows
        assert length == units * piece.call.band_rows
        cuts = sorted({0, units, *data.draw(st.lists(st.integers(0, units), max_size=3))})
        edges = [cut * piece.call.band_rows for cut in cuts]
        bands = [apply_op(piece.call, _take(rows, piece, a, b)) for a, b in itertools.pairwise(edges) if b > a]
        assert np.array_equal(np.concatenate([*bands, whole[:0]]), whole)


@pytest.mark.parametrize("name", APPLY)
def test_every_applied_op_is_named_by_some_piece(name):
    named = set()
    for shape, op, targets in (((4, 2), Same(), ("t",)), ((4, 2), RopeToHalves(), ("t",)), ((4, 2), Transpose(), ("t",))):
        named |= {piece.call.name for piece in op.pieces("s", shape, targets, {"head_dim": 4})}
    named |= {call.name for call in TO_PAIRS.values()}  # which no rule asks for, but a GGUF file
    assert name in named


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([(), (3,)]), st.integers(1, 2))
def test_pairs_made_of_halves_are_what_llama_cpp_permutes_them_to(heads, half, columns, band):
    rows = np.arange(heads * 2 * half * int(np.prod(columns)), dtype=np.uint32).reshape(heads * 2 * half, *columns)
    call = OpCall("rope_to_pairs", 2 * half)
    truth = torch.from_numpy(rows.view(np.int32)).unflatten(0, (heads, 2, half)).transpose(1, 2).flatten(0, 2).numpy().view(np.uint32)
    edges = sorted({0, min(band, heads), heads})
    bands = [apply_op(call, rows[a * 2 * half : b * 2 * half]) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(bands), truth)
    assert np.array_equal(apply_op(OpCall("rope_to_halves", 2 * half), truth), rows)


@pytest.mark.parametrize(
    ("op", "shape", "targets", "sizes"),
    [
        (RopeToHalves(), (6, 2), ("t",), {"head_dim": 4}),  # half a head
        (RopeToHalves(), (6, 2), ("t",), {"head_dim": 3}),  # no pairs in an odd head
        (RopeToHalves(), (), ("t",), {"head_dim": 4}),
        (Unstack(), (3, 5, 2), ("{expert}.a", "{expert}.b"), {"num_experts": 3}),  # 5 rows in 2 parts
        (Unstack(), (3, 4, 2), ("{expert}.a", "{expert}.b"), {"num_experts": 4}),
        (Unstack(), (3,), ("{expert}.a",), {"num_experts": 3}),
        (SplitQkv(rope_pairs=True), (15, 2), ("q", "k", "v"), {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}),
        (CutRows("vocab"), (5, 2), ("t",), {"vocab": 6}),
        (CutRows("vocab"), (), ("t",), {"vocab": 6}),
        (SplitRows(), (5, 2), ("a", "b"), {}),
        (SplitRows(), (), ("a", "b"), {}),
        (Transpose(), (4,), ("t",), {}),
        (JoinQkv(), (15, 2), ("t",), {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}),
        (SplitQkv(rope_pairs=False), (), ("q", "k", "v"), {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}),
    ],
)
def test_a_shape_the_op_does_not_fit_is_refused_by_the_sources_name(op, shape, targets, sizes):
    with pytest.raises(ShapeError, match=r"^model\.w: "):
        op.pieces("model.w", shape, targets, sizes)
