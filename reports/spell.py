"""How values read in every rendering: numbers, bytes, seconds, and text that cannot play tricks on a reader.

Non-finite numbers stay visible, spelled as in the stored JSON: NaN, Infinity, -Infinity.
"""

import math
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime

from reports.model import Measure

# Unicode categories that show nothing or reorder what surrounds them: controls, formats (bidi overrides, zero width), surrogates, private
# use, unassigned, line and paragraph separators. XML 1.0 cannot hold most of them, and UTF-8 cannot hold a surrogate.
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def spell_unseen(text: str) -> str:
    """Return `text` with each character that shows nothing written as its escape, `\\x1b` or `\\u202e`.

    Args:
        text: any text, a name out of a checkpoint among them; lone surrogates allowed.

    Returns:
        One line of text that any rendering can hold.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in UNSEEN else c for c in text)


def spell_number(value: float) -> str:
    """Return a number with four significant digits; counts keep all theirs, in groups of three.

    Args:
        value: any number, NaN and infinities included.

    Returns:
        `0.01235`, `1.235e-09`, `12 345`, `1 - 3.1e-06`, `NaN`, `-Infinity`.
    """
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")  # narrow no-break space: a group never wraps
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if 0.5 < value < 1 and f"{value:.4g}" == "1":
        return f"1 - {1 - value:.2g}"  # a cosine: what it lacks is what counts
    return f"{value:.4g}"


def spell_measure(value: Measure) -> str:
    """Return what a check measured, as text.

    Args:
        value: a number, a text or a truth value.

    Returns:
        One line of text.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return spell_unseen(value) if isinstance(value, str) else spell_number(value)


def format_bytes(nbytes: int) -> str:
    """Return a size for people, in powers of 1000.

    Args:
        nbytes: bytes.

    Returns:
        `1.3 GB`.
    """
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_SIZE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{nbytes} bytes" if unit == 0 else f"{value:.3g} {_SIZE_UNITS[unit]}"


def spell_bytes(nbytes: float) -> str:
    """Return a byte count in binary units, `3.91 GiB`.

    Args:
        nbytes: a count, or bytes per second.

    Returns:
        Three significant digits and the unit.
    """
    size, unit = float(nbytes), 0
    while size >= 1023.5 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_BYTE_UNITS[unit]}"


def spell_seconds(seconds: float) -> str:
    """Return a duration, `0.4 ms`, `1.25 s`, `3 min 04 s`, `2 h 05 min`.

    Args:
        seconds: any duration; NaN and infinities stay visible.

    Returns:
        The duration in the unit a reader would pick.
    """
    if not math.isfinite(seconds):
        return spell_number(seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def spell_moment(iso: str) -> str:
    """Return a moment as people write it, `2026-11-29 16:05:38 UTC`.

    Args:
        iso: ISO 8601 with its offset.

    Returns:
        The moment in UTC, to the second.

    Raises:
        ValueError: not ISO 8601.
    """
    return datetime.fromisoformat(iso).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def spell_limits(measured: Mapping[str, Measure], limits: Mapping[str, Measure]) -> list[tuple[str, str, str]]:
    """Return what was measured beside its limit, in the order measured; limits nothing was measured for come last.

    Args:
        measured: value by name.
        limits: limit by name.

    Returns:
        (name, value, limit) texts; an absent one is empty.
    """
    names = [*measured, *(name for name in limits if name not in measured)]
    return [
        (
            spell_unseen(name),
            spell_measure(measured[name]) if name in measured else "",
            spell_measure(limits[name]) if name in limits else "",
        )
        for name in names
    ]


def _escape(char: str) -> str:
    point = ord(char)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
