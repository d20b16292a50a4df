"""Flat ranges as boxes, against numpy's own C order."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import CoverageError
from tasks.engine.tensors.flat import boxes_of_range, is_flat
from tasks.engine.tensors.region import Region, check_tiling


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    cuts = draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2))
    return shape, min(cuts), max(cuts)


@given(ranges())
def test_boxes_hold_the_range_in_order(drawn):
    shape, start, stop = drawn
    numbers = np.arange(prod(shape)).reshape(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    parts = [numbers[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] for box in boxes]
    assert [int(n) for part in parts for n in part.reshape(-1)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_ranges_that_follow_each_other_tile_the_tensor(drawn):
    shape, first, second = drawn
    total = prod(shape)
    boxes = [box for a, b in ((0, first), (first, second), (second, total)) for box in boxes_of_range(shape, a, b)]
    offsets, shapes = (
        np.array(rows, dtype=np.int64).reshape(len(boxes), len(shape)) for rows in ([b.offset for b in boxes], [b.shape for b in boxes])
    )
    check_tiling("w", shape, offsets, shapes)


@given(ranges(), st.data())
def test_a_lost_or_a_doubled_range_is_found(drawn, data):
    shape, first, second = drawn
    parts = [boxes_of_range(shape, a, b) for a, b in ((0, first), (first, second), (second, prod(shape)))]
    wrong = data.draw(st.sampled_from([part for part in parts if part]))
    kept = [box for part in parts if part is not wrong or data.draw(st.booleans()) for box in part]
    boxes = [*kept, *(wrong if len(kept) == sum(map(len, parts)) else ())]
    offsets, shapes = (
        np.array(rows, dtype=np.int64).reshape(len(boxes), len(shape)) for rows in ([b.offset for b in boxes], [b.shape for b in boxes])
    )
    with pytest.raises(CoverageError):
        check_tiling("w", shape, offsets, shapes)


@given(ranges(), st.data())
def test_a_box_is_flat_exactly_when_its_numbers_have_no_gap(drawn, data):
    shape, _, _ = drawn
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    numbers = np.arange(prod(shape)).reshape(shape)[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))].reshape(-1)
    has_no_gap = bool((np.diff(numbers) == 1).all())
    assert is_flat(Region(offset, extent), Region.whole(shape)) == has_no_gap
