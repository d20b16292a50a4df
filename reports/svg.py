"""Small charts as inline SVG: no library, no script, no outside file. Colours come from the page's CSS classes.

Every chart is at most 360 units wide, so that a phone shows it unscaled, and starts with a `<title>` that says in words what it shows.
Coordinates are rounded to a tenth: a chart of a hundred layers stays near 10 kB.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from reports.roles import Point, Role
from reports.spell import spell_number, spell_unseen

MAX_SLOTS = 180  # points along an axis before neighbours are merged
_DOTTED_UP_TO = 40  # layers; beyond that the line alone is legible
_STYLE = (
    "text{font:10.5px system-ui,sans-serif;fill:#5b6470}.rule{stroke:#d9dee4;fill:none}"
    ".line{fill:none;stroke:#2456c9;stroke-width:1.5}.dot{fill:#2456c9}.cross{stroke:#b3261e;stroke-width:2;fill:none}"
)
_BAR = Markup('<svg class="bar {}" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width="{}" height="8"/></svg>')


@dataclass(frozen=True, slots=True)
class LogScale:
    """A vertical axis in decades, from 10**`bottom` to 10**`top`, drawn between the pixel rows `floor` and `ceiling`."""

    bottom: int
    top: int
    floor: float
    ceiling: float

    def y(self, value: float) -> float:
        """Return the pixel row of a value.

        Args:
            value: any positive number; one off the scale lies on its edge.

        Returns:
            The row, between `ceiling` and `floor`.
        """
        share = (math.log10(value) - self.bottom) / (self.top - self.bottom)
        return self.floor - (self.floor - self.ceiling) * min(1.0, max(0.0, share))

    def ticks(self, limit: int = 4) -> list[int]:
        """Return the exponents to label.

        Args:
            limit: about how many.

        Returns:
            Evenly spaced exponents, from the bottom up.
        """
        return list(range(self.bottom, self.top + 1, max(1, math.ceil((self.top - self.bottom) / limit))))


@dataclass(frozen=True, slots=True)
class _Frame:
    # The plotting area of a chart, in pixels, and the x positions of its slots.
    width: int
    height: int
    left: int
    right: int
    slots: int

    def x(self, slot: float) -> float:
        span = self.width - self.left - self.right
        return self.left + (span / 2 if self.slots == 1 else span * slot / (self.slots - 1))


def fit_scale(values: Iterable[float], floor: float, ceiling: float) -> LogScale:
    """Return the smallest whole decades that hold the values.

    Args:
        values: any numbers; only finite positive ones count.
        floor: pixel row of the lowest decade.
        ceiling: pixel row of the highest.

    Returns:
        The scale; one decade around 1 when no value counts.
    """
    exponents = [math.log10(v) for v in values if math.isfinite(v) and v > 0] or [0.0]
    bottom, top = math.floor(min(exponents)), math.ceil(max(exponents))
    return LogScale(bottom, max(top, bottom + 1), floor, ceiling)


def draw_bar(share: float, style: str) -> Markup:
    """Return a horizontal bar as wide as its cell, filled to `share`.

    Args:
        share: 0 to 1.
        style: CSS class of the bar.

    Returns:
        The SVG.
    """
    return _BAR.format(style, f"{100 * min(1.0, max(0.0, share)):.1f}")


def draw_roles(roles: Sequence[Role]) -> list[tuple[Role, Markup]]:
    """Return one chart per role, all on one scale so that they can be compared: absmax and rms over layers.

    Args:
        roles: those to draw.

    Returns:
        (role, SVG) in the order given. A layer with several tensors is a band from least to greatest around the median; a layer with
        a NaN or an infinity carries a cross at the top, one that is all zero a ring at the bottom.
    """
    height = 104
    values = [v for role in roles for p in (*role.absmax, *role.rms) for v in (p.low, p.high)]
    scale = fit_scale(values, height - 18, 12)
    return [(role, _draw_role(role, scale, height)) for role in roles]


def draw_positions(values: Sequence[float], limit: float, name: str) -> Markup:
    """Return the mean KL per sequence position on a log scale, with the limit of the mean as a dashed line.

    Args:
        values: one per position; of merged neighbours the worst is drawn. Zero lies on the floor, NaN is a cross at the top.
        limit: the limit; NaN for none.
        name: the comparison's name.

    Returns:
        The SVG.
    """
    slots = worst_of(values, MAX_SLOTS)
    frame = _Frame(360, 150, 44, 8, len(slots))
    scale = fit_scale([*slots, limit], frame.height - 24, 12)
    shown = [(frame.x(i), scale.y(v) if v > 0 else scale.floor) for i, v in enumerate(slots) if not math.isnan(v) and v < math.inf]
    marks = [_cross(frame.x(i), scale.ceiling) for i, v in enumerate(slots) if not math.isfinite(v)]
    broken = sum(1 for v in values if not math.isfinite(v))
    finite = [v for v in values if math.isfinite(v)]
    words = f"{name}: mean KL by position, {len(values)} positions"
    words += f", from {spell_number(min(finite))} to {spell_number(max(finite))}" if finite else ""
    words += f", {broken} not finite" if broken else ""
    body = [*_grid(frame, scale), *_ends(frame, "position 0", str(len(values) - 1))]
    if math.isfinite(limit) and limit > 0:
        y = scale.y(limit)
        body.append(f'<path class="limit" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>')
        body.append(f'<text class="limit" x="{frame.width - frame.right}" y="{y - 3:.1f}" text-anchor="end">limit of the mean</text>')
    body += [_line(shown, "one"), *marks]
    return _svg(frame, words, body)


def draw_sorted(values: Sequence[float], name: str, ends: tuple[str, str]) -> Markup:
    """Return values from the largest to the smallest on a log scale.

    Args:
        values: any numbers, in any order; of merged neighbours the largest is drawn. Zero lies on the floor, what is not finite is a cross.
        name: what they are.
        ends: what stands under the largest and the smallest.

    Returns:
        The SVG.
    """
    ordered = sorted(values, key=lambda value: (math.isfinite(value), -value if math.isfinite(value) else 0.0))
    slots = worst_of(ordered, MAX_SLOTS)
    frame = _Frame(360, 150, 44, 8, len(slots))
    scale = fit_scale(slots, frame.height - 24, 12)
    shown = [(frame.x(i), scale.y(v) if v > 0 else scale.floor) for i, v in enumerate(slots) if math.isfinite(v)]
    marks = [_cross(frame.x(i), scale.ceiling) for i, v in enumerate(slots) if not math.isfinite(v)]
    finite = [v for v in values if math.isfinite(v)]
    words = f"{name}, sorted, {len(values)}"
    words += f", from {spell_number(max(finite))} to {spell_number(min(finite))}" if finite else ", none finite"
    dots = [f'<circle class="dot one" cx="{x:.1f}" cy="{y:.1f}" r="1.8"/>' for x, y in shown] if len(shown) <= _DOTTED_UP_TO else []
    return _svg(frame, words, [*_grid(frame, scale), *_ends(frame, *ends), _line(shown, "one"), *dots, *marks])


def draw_trend(values: Sequence[float], green: list[bool], name: str, ends: tuple[str, str]) -> Markup:
    """Return a number over several runs on a log scale; a run whose verdict was red has a cross.

    Args:
        values: one per run, the newest last; those that are not positive lie on the floor.
        green: whether each run's verdict was green.
        name: what the number is.
        ends: what stands under the first run and the last.

    Returns:
        The SVG.
    """
    frame = _Frame(236, 104, 40, 8, len(values))
    scale = fit_scale(values, frame.height - 18, 12)
    points = [(frame.x(i), scale.y(value) if value > 0 else scale.floor) for i, value in enumerate(values)]
    marks = [f'<circle class="dot one" cx="{x:.1f}" cy="{y:.1f}" r="1.8"/>' for (x, y), good in zip(points, green, strict=True) if good]
    marks += [_cross(x, y) for (x, y), good in zip(points, green, strict=True) if not good]
    words = f"{name} over {len(values)} runs, {green.count(False)} red, from {spell_number(min(values))} to {spell_number(max(values))}"
    return _svg(frame, words, [*_grid(frame, scale), *_ends(frame, *ends), _line(points, "one"), *marks])


def stand_alone(chart: Markup) -> str:
    """Return a chart as a picture of its own, three times its size, with the colours that a page would have given it.

    Args:
        chart: an SVG of this module.

    Returns:
        SVG with its namespace, a white ground and a style.
    """
    head, body = chart[: chart.index(">")], chart[chart.index(">") + 1 :]
    sized = re.sub(r' (width|height)="(\d+)"', lambda found: f' {found[1]}="{3 * int(found[2])}"', str(head))
    return f'{sized} xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{body}'


def worst_of(values: Sequence[float], slots: int) -> list[float]:
    """Return at most `slots` values, each the worst of a run of neighbours; NaN is worst of all.

    Args:
        values: any numbers.
        slots: how many to keep.

    Returns:
        `values` themselves when they fit.
    """
    step = max(1, math.ceil(len(values) / slots))
    return [max(values[i : i + step], key=lambda v: (math.isnan(v), v)) for i in range(0, len(values), step)]


def _draw_role(role: Role, scale: LogScale, height: int) -> Markup:
    frame = _Frame(236, height, 40, 8, len(role.rms))
    first, last = role.rms[0].layer, role.rms[-1].layer
    body = [*_grid(frame, scale), *_ends(frame, f"layer {first}", str(last))]
    for points, style in ((role.absmax, "two"), (role.rms, "one")):
        body += _series(points, frame, scale, style)
    for i, point in enumerate(role.rms):
        if point.nonfinite:
            body.append(_cross(frame.x(i), scale.ceiling))
        if point.zeros:
            body.append(f'<circle class="zero" cx="{frame.x(i):.1f}" cy="{scale.floor}" r="2.6"/>')
    return _svg(frame, f"{role.name}: {_range('rms', role.rms)}, {_range('absmax', role.absmax)} over {len(role.rms)} layers", body)


def _range(name: str, points: Sequence[Point]) -> str:
    values = [v for p in points for v in (p.low, p.high) if not math.isnan(v)]
    return f"{name} {spell_number(min(values))} to {spell_number(max(values))}" if values else f"{name} nowhere finite and positive"


def _series(points: Sequence[Point], frame: _Frame, scale: LogScale, style: str) -> list[str]:
    seen = [(frame.x(i), point) for i, point in enumerate(points) if not math.isnan(point.mid)]
    parts = []
    if any(point.low < point.high for _, point in seen):
        upper = [f"{x:.1f} {scale.y(point.high):.1f}" for x, point in seen]
        lower = [f"{x:.1f} {scale.y(point.low):.1f}" for x, point in reversed(seen)]
        parts.append(f'<path class="band {style}" d="M{"L".join(upper + lower)}Z"/>')
    middle = [(x, scale.y(point.mid)) for x, point in seen]
    parts.append(_line(middle, style))
    if len(middle) <= _DOTTED_UP_TO:
        parts += [f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="1.8"/>' for x, y in middle]
    return parts


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    if not points:
        return ""
    return f'<path class="line {style}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6"/>'


def _grid(frame: _Frame, scale: LogScale) -> list[str]:
    parts = []
    for exponent in scale.ticks():
        y = scale.y(10.0**exponent)
        parts.append(f'<path class="rule" d="M{frame.left} {y:.1f}H{frame.width - frame.right}"/>')
        parts.append(f'<text x="{frame.left - 5}" y="{y + 3.5:.1f}" text-anchor="end">{_power(exponent)}</text>')
    return parts


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"1e{exponent}"


def _ends(frame: _Frame, first: str, last: str) -> list[str]:
    y = frame.height - 4
    parts = [f'<text x="{frame.x(0):.1f}" y="{y}">{escape(first)}</text>']
    if frame.slots > 1:
        parts.append(f'<text x="{frame.width - frame.right}" y="{y}" text-anchor="end">{escape(last)}</text>')
    return parts


def _svg(frame: _Frame, words: str, body: Iterable[str]) -> Markup:
    title = escape(spell_unseen(words))
    return Markup(  # every piece is a number, a constant or escaped above
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" height="{frame.height}" role="img">'
        f"<title>{title}</title>{''.join(body)}</svg>"
    )
