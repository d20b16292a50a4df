"""Boxes against a count of elements in a numpy array."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import CoverageError
from tasks.engine.tensors.region import Region, check_tiling

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_of(draw, *, leaving: bool):
    """A shape and boxes; where `leaving`, some may stick out of it."""
    shape = draw(SHAPES)
    over = 1 if leaving else 0
    found = []
    for _ in range(draw(st.integers(0, 6))):
        offset = tuple(draw(st.integers(-over, n + over)) for n in shape)
        found.append((offset, tuple(draw(st.integers(0, max(0, n + over - o))) for n, o in zip(shape, offset, strict=True))))
    return shape, found


@st.composite
def grids(draw):
    """A shape cut into a grid, the cells in any order, with empty boxes among them."""
    shape = draw(SHAPES)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    cells = [((), ())]
    for edges in cuts:
        cells = [((*o, a), (*s, b - a)) for o, s in cells for a, b in itertools.pairwise(edges)]
    for _ in range(draw(st.integers(0, 2)) if shape else 0):
        cells.append((tuple(draw(st.integers(0, n)) for n in shape), (0,) * len(shape)))
    return shape, draw(st.permutations(cells))


def _count(shape, boxes):
    # Elements per cell of a canvas with a margin of 2, so that what sticks out is counted too.
    canvas = np.zeros([n + 4 for n in shape], dtype=int)
    for offset, extent in boxes:
        canvas[tuple(slice(o + 2, o + 2 + n) for o, n in zip(offset, extent, strict=True))] += 1
    inside = canvas[tuple(slice(2, 2 + n) for n in shape)]
    return inside, canvas.sum() - inside.sum()


def _check(shape, boxes):
    offsets = np.array([o for o, _ in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    shapes = np.array([s for _, s in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    check_tiling("w", shape, offsets, shapes)


@given(boxes_of(leaving=True))
def test_boxes_tile_exactly_when_every_element_is_counted_once(drawn):
    shape, boxes = drawn
    inside, outside = _count(shape, boxes)
    if outside == 0 and (inside == 1).all():
        _check(shape, boxes)
    else:
        with pytest.raises(CoverageError, match=r"^w: "):
            _check(shape, boxes)


@given(grids())
def test_a_grid_of_cells_in_any_order_tiles(drawn):
    _check(*drawn)


@given(grids(), st.data())
def test_a_grid_without_one_cell_does_not_tile_and_the_message_names_elements_that_lack(drawn, data):
    shape, cells = drawn
    full = [n for n, (_, extent) in enumerate(cells) if np.prod(extent, dtype=int) > 0]
    if not full:
        return
    gone = data.draw(st.sampled_from(full))
    with pytest.raises(CoverageError, match="in no shard") as refusal:
        _check(shape, [cell for n, cell in enumerate(cells) if n != gone])
    assert Region(*cells[gone]).rows(shape) in str(refusal.value)


@given(grids(), st.data())
def test_a_grid_with_one_cell_twice_does_not_tile(drawn, data):
    shape, cells = drawn
    full = [cell for cell in cells if np.prod(cell[1], dtype=int) > 0]
    if not full:
        return
    with pytest.raises(CoverageError, match="in 2 shards"):
        _check(shape, [*cells, data.draw(st.sampled_from(full))])


@given(boxes_of(leaving=False))
def test_an_intersection_holds_the_elements_both_boxes_have(drawn):
    shape, boxes = drawn
    for one in boxes:
        for other in boxes:
            both = _count(shape, [one])[0] * _count(shape, [other])[0]
            found = Region(*one).intersect(Region(*other))
            if found is None:
                assert both.sum() == 0
            else:
                assert found.numel > 0
                assert np.array_equal(_count(shape, [(found.offset, found.shape)])[0], both)
                whole = np.arange(both.size).reshape(shape)
                cut = whole[Region(*one).within(Region.whole(shape))]
                assert np.array_equal(cut[found.within(Region(*one))], whole[found.within(Region.whole(shape))])


def test_boxes_on_the_diagonal_of_a_cube_are_refused_without_a_grid_of_their_edges():
    n = 700  # 343 million cells
    corners = np.repeat(np.arange(n)[:, None], 3, axis=1)
    with pytest.raises(CoverageError, match=r"\[0:1, 0:1, 1:700\] of \(700, 700, 700\) are in no shard"):
        check_tiling("w", (n, n, n), corners, np.ones_like(corners))
