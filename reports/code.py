"""One row of the tables of finding codes."""

from dataclasses import dataclass

from reports.model import Severity


@dataclass(frozen=True, slots=True)
class Code:
    """What a code means, and what to do about it. `severity` is "warning" for what never turns a verdict."""

    meaning: str
    remedy: str
    severity: Severity = "error"
