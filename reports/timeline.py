"""The timeline of a run as inline SVG: a lane per kind of thing, a mark per step, neighbours merged where they would overlap.

Its size does not grow with the run: a lane has at most one mark per pixel column.
"""

from collections.abc import Sequence

from markupsafe import Markup, escape

from reports.model import Mark
from reports.spell import spell_unseen

WIDTH, LEFT, RIGHT, LANE, FOOT = 860, 96, 12, 22, 20
MIN_MARK = 3.0  # pixels
# Lane → the class of its marks; others are drawn in ink
STYLES = {"kept": "one", "goes": "two", "weights only": "one thin", "spike": "bad", "gap in the log": "bad", "pin": "pinned"}


def draw_timeline(marks: Sequence[Mark]) -> Markup:
    """Return the chart.

    Args:
        marks: in any order; lanes are drawn in the order in which they come first.

    Returns:
        The SVG; nothing without marks.
    """
    if not marks:
        return Markup()
    lanes = list(dict.fromkeys(mark.lane for mark in marks))
    first, last = min(mark.first for mark in marks), max(mark.last for mark in marks)
    height = LANE * len(lanes) + FOOT
    body = []
    for row, lane in enumerate(lanes):
        here = sorted((mark for mark in marks if mark.lane == lane), key=lambda mark: mark.first)
        body.append(_draw_lane(lane, here, row * LANE, first, max(1, last - first)))
    words = f"{len(marks)} things in {len(lanes)} lanes, from step {first} to step {last}"
    return Markup(  # every piece is a number, a constant or escaped
        f'<svg class="chart timeline" viewBox="0 0 {WIDTH} {height}" role="img"><title>{escape(words)}</title>{"".join(body)}'
        f'<text x="{LEFT}" y="{height - 5}">step {first}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{height - 5}" text-anchor="end">{last}</text></svg>'
    )


def _draw_lane(lane: str, marks: Sequence[Mark], top: int, first: int, span: int) -> str:
    parts = [f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(lane)} {len(marks)}</text>']
    parts.append(f'<path class="rule" d="M{LEFT} {top + LANE - 1}H{WIDTH - RIGHT}"/>')
    style = STYLES.get(lane, "ink")
    for start, end, labels, count in _merge(marks, first, span):
        told = labels if count == 1 else f"{count}: {labels} …"
        parts.append(
            f'<rect class="mark {style}" x="{start:.1f}" y="{top + 5}" width="{end - start:.1f}" height="12">'
            f"<title>{escape(spell_unseen(told))}</title></rect>"
        )
    return "".join(parts)


def _merge(marks: Sequence[Mark], first: int, span: int) -> list[tuple[float, float, str, int]]:
    # From, to, the first one's words, how many: marks that would touch become one.
    merged: list[tuple[float, float, str, int]] = []
    scale = (WIDTH - LEFT - RIGHT - MIN_MARK) / span
    for mark in marks:
        start = LEFT + (mark.first - first) * scale
        end = max(start + MIN_MARK, LEFT + (mark.last - first) * scale)
        if merged and start < merged[-1][1]:
            begun, until, words, count = merged[-1]
            merged[-1] = (begun, max(until, end), words, count + 1)
        else:
            merged.append((start, end, mark.label, 1))
    return merged
