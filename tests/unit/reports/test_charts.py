"""The inline SVG: well-formed, in words, and with what is wrong in sight."""

import math
import re
from xml.etree import ElementTree

import pytest

from reports.roles import group_roles
from reports.svg import MAX_SLOTS, draw_bar, draw_positions, draw_roles, draw_sorted, fit_scale, worst_of
from tests.builders.reports import SCRIPT, statistics


def series(values, name="layers.{}.w"):
    """One role whose layers have these rms values."""
    (role,) = group_roles([statistics(name.format(n), v) for n, v in enumerate(values)])
    return role


def classes(svg):
    """The classes of all shapes, in drawing order."""
    return [element.get("class", "") for element in ElementTree.fromstring(svg).iter() if element.get("class")]


def test_a_scale_holds_all_values_in_whole_decades():
    scale = fit_scale([0.02, 3.0, math.nan, 0.0, -1.0], floor=100, ceiling=0)
    assert (scale.bottom, scale.top) == (-2, 1)
    assert scale.y(0.01) == 100
    assert scale.y(10) == 0
    assert scale.y(1e9) == 0
    assert scale.y(0.3162277660168379) == pytest.approx(50)


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [1.0], [5e-324, 1.7e308]])
def test_a_scale_exists_for_any_values(values):
    scale = fit_scale(values, floor=100, ceiling=0)
    assert scale.top > scale.bottom
    assert len(scale.ticks()) <= 6


def test_an_outlier_is_drawn_above_its_neighbours():
    ((_, svg),) = draw_roles([series([0.02, 0.02, 20.0, 0.02])])
    line = next(e for e in ElementTree.fromstring(svg).iter() if e.get("class") == "line one")
    rows = [float(point.split()[1]) for point in line.get("d")[1:].split("L")]
    assert rows.index(min(rows)) == 2


def test_nan_is_a_cross_and_zero_a_ring():
    ((_, svg),) = draw_roles([series([0.1, math.nan, 0.0])])
    assert classes(svg).count("cross") == 1
    assert classes(svg).count("zero") == 1
    assert "cross" not in str(draw_roles([series([0.1, 0.2, 0.3])])[0][1])


def test_a_role_without_any_value_is_still_drawn():
    ((_, svg),) = draw_roles([series([math.nan, math.nan])])
    assert classes(svg).count("cross") == 2
    assert "nowhere finite and positive" in svg


def test_charts_of_several_roles_share_one_scale():
    small, large = (svg for _, svg in draw_roles([series([1e-3, 1e-3]), series([10.0, 10.0], "layers.{}.norm")]))
    labels = [[e.text for e in ElementTree.fromstring(svg).iter() if e.get("text-anchor") == "end"][:-1] for svg in (small, large)]
    assert labels[0] == labels[1]


def test_a_hostile_name_is_escaped_in_the_title():
    ((_, svg),) = draw_roles([series([1.0, 2.0], "layers.{}." + SCRIPT)])
    assert "<script" not in svg
    assert SCRIPT in next(e.text for e in ElementTree.fromstring(svg).iter() if e.tag == "title")


def test_merged_positions_keep_the_worst_and_nan_is_worst_of_all():
    assert worst_of([1.0, 5.0, 2.0, math.inf], 2) == [5.0, math.inf]
    assert math.isnan(worst_of([1.0, math.nan, math.inf], 1)[0])
    assert worst_of([1.0, 2.0], 5) == [1.0, 2.0]


def test_a_long_sequence_draws_no_more_than_the_slots_and_keeps_its_peak():
    svg = draw_positions([1e-6] * 5000 + [3.0] + [1e-6] * 3000, 1e-3, "cast")
    line = next(e for e in ElementTree.fromstring(svg).iter() if e.get("class") == "line one")
    assert line.get("d").count("L") < MAX_SLOTS
    assert "to 3" in svg


def test_positions_that_are_not_finite_are_crosses_and_named():
    svg = draw_positions([0.1, math.nan, math.inf, 0.0], math.nan, "mapping")
    assert classes(svg).count("cross") == 2
    assert "2 not finite" in svg
    assert "limit" not in svg


def test_the_limit_is_drawn_where_there_is_one():
    assert "limit of the mean" in draw_positions([0.1], 0.2, "cast")


@pytest.mark.parametrize(("share", "width"), [(-1.0, "0.0"), (0.5, "50.0"), (7.0, "100.0")])
def test_a_bar_never_leaves_its_cell(share, width):
    assert f'<rect width="{width}"' in draw_bar(share, "one")


def test_sorted_values_fall_from_left_to_right_and_what_is_not_finite_is_a_cross():
    svg = draw_sorted([0.01, 0.1, math.inf, 0.001], "error of weights", ("largest", "smallest"))
    heights = [float(found) for found in re.findall(r'class="dot one" cx="[\d.]+" cy="([\d.]+)"', svg)]
    assert heights == sorted(heights)
    assert len(heights) == 3
    assert svg.count('class="cross"') == 1
    assert "error of weights, sorted, 4, from 0.1 to 0.001" in svg


def test_ten_thousand_weights_draw_no_more_than_the_slots_and_keep_the_worst():
    svg = draw_sorted([0.02] * 9999 + [0.5], "error", ("a", "b"))
    assert svg.count("L") < MAX_SLOTS
    assert "from 0.5 to 0.02" in svg
