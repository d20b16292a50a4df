"""The finding codes: one table of code, meaning and remedy.

A code is `<check>.<what>`; it never changes its meaning and is never reused. A test asserts that each has a planted fault.
"""

from dataclasses import dataclass

from reports.model import Finding, Severity


@dataclass(frozen=True, slots=True)
class Code:
    """What a code means, and what to do about it. `severity` is "warning" for what never turns a verdict."""

    meaning: str
    remedy: str
    severity: Severity = "error"


CODES: dict[str, Code] = {
    "inventory.missing": Code("a tensor the config implies is absent", "Export again from a complete checkpoint."),
}


def finding(code: str, where: str, *, expected: str = "", found: str = "") -> Finding:
    """Return a finding with the severity and remedy of its code.

    Args:
        code: a key of CODES.
        where: tensor, file or field.
        expected: what should have been there.
        found: what was.

    Returns:
        The finding.

    Raises:
        KeyError: no such code.
    """
    row = CODES[code]
    return Finding(code, row.severity, where, expected, found, row.remedy)
