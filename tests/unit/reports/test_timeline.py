"""The timeline: a lane per kind in the order they come, marks where their steps are, a size that does not grow with the run."""

import xml.etree.ElementTree as ET

import pytest

from reports.model import Mark
from reports.timeline import LEFT, RIGHT, WIDTH, draw_timeline


def _rects(svg: str) -> list[tuple[float, float, str]]:
    return [(float(r.get("x")), float(r.get("width")), r.find("title").text) for r in ET.fromstring(svg).iter("rect")]


def test_marks_lie_where_their_steps_are():
    svg = draw_timeline([Mark("kept", step, step, f"step-{step}") for step in (0, 50, 100)] + [Mark("gap in the log", 25, 75, "a gap")])
    (first, _, words), (middle, _, _), (last, width, _), gap = _rects(svg)
    assert (first, words) == (LEFT, "step-0")
    assert abs(last + width - (WIDTH - RIGHT)) < 0.2
    assert abs(middle - (first + last) / 2) < 0.2
    assert gap[0] < middle < gap[0] + gap[1]
    assert [text.text for text in ET.fromstring(svg).iter("text")] == ["kept 3", "gap in the log 1", "step 0", "100"]


def test_neighbours_that_would_overlap_are_one_mark_that_counts_them():
    svg = draw_timeline([Mark("goes", step, step, f"step-{step}") for step in range(10_000)])
    rects = _rects(svg)
    assert len(rects) < WIDTH
    assert len(svg) < 60_000
    assert rects[0][2].endswith("step-0 …")
    assert sum(int(words.split(":")[0]) for _, _, words in rects) == 10_000


def test_one_step_alone_and_nothing_at_all():
    assert len(_rects(draw_timeline([Mark("pin", 7, 7, "asked")]))) == 1
    assert draw_timeline([]) == ""


def test_labels_are_escaped():
    svg = draw_timeline([Mark("<pin>", 1, 1, '<script>alert("x")</script>')])
    assert "<script>" not in svg
    assert "<pin>" not in svg


@pytest.mark.parametrize(
    ("lane", "style"),
    [
        ("kept", "one"),
        ("goes", "two"),
        ("weights only", "one thin"),
        ("spike", "bad"),
        ("gap in the log", "bad"),
        ("pin", "pinned"),
        ("drill", "ink"),
    ],
)
def test_what_is_kept_and_what_goes_are_drawn_apart(lane, style):
    svg = draw_timeline([Mark(lane, 7, 7, "step-7")])
    assert [rect.get("class") for rect in ET.fromstring(svg).iter("rect")] == [f"mark {style}"]
