"""Every tensor of a GGUF file holds the source's values in its type, bit for bit, and queries' and keys' rows in the order engines rotate.

What should be stored is made a second time, elsewhere (tasks/measure_gguf.py): by torch's cast, or by the gguf package's own quantization.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.policy import ENCODING_ERRORS, ROUNDING_SLACK

_BOUND = ENCODING_ERRORS["int", 8]


@dataclass(frozen=True, slots=True)
class _Row:
    # A row of a GgufTable.
    name: str
    published: str
    type: str
    compared: int
    units: int
    differing: int
    first: int
    unpermuted: int
    relative_error: float
    rounding: float
    expected_crc32: int
    found_crc32: int


def examine(evidence: Evidence) -> Outcome:
    """Judge the comparison of every tensor with the source.

    Args:
        evidence: headers and a GgufTable.

    Returns:
        Findings, and the number of tensors compared.
    """
    assert evidence.gguf is not None
    rows = [_Row(*values) for values in evidence.gguf.itertuples(index=False, name=None)]
    wanted: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        if row.compared:
            wanted[row.expected_crc32].append(row.name)
    compared = {row.name for row in rows if row.compared}
    stored = [tensor.name for file in evidence.release.ggufs for tensor in file.tensors]
    findings = [
        *(finding("gguf_values.not-compared", name, expected="compared", found="not compared") for name in stored if name not in compared),
        *(found for row in rows for found in _judge(row, wanted)),
    ]
    quantized = [row.relative_error for row in rows if row.compared and row.type == "Q8_0"]
    measured = {
        "compared": sum(row.units for row in rows),
        "differing": sum(row.differing for row in rows),
        "largest_relative_error": max((row.relative_error for row in rows if row.compared), default=0.0),
    }
    limits: Mapping[str, float] = {"differing": 0, **({"largest_relative_error": _BOUND} if quantized else {})}
    return Outcome(tuple(findings), len(compared), measured, limits)


def _judge(row: _Row, wanted: Mapping[int, Sequence[str]]) -> Iterator[Finding]:
    if not row.compared:
        return
    others = [name for name in wanted.get(row.found_crc32, ()) if name != row.name]
    bound = max(_BOUND, ROUNDING_SLACK * row.rounding)
    counted = f"{row.differing} of {row.units} differ, first at {row.first}"
    if row.differing and others:
        yield finding("gguf_values.exchanged", row.name, expected=f"the values of {row.published}", found=f"those of {others[0]}")
    elif row.unpermuted:
        yield finding("gguf_values.unpermuted", row.name, expected="rotary pairs side by side", found="rotary halves, as published")
    elif row.differing:
        yield finding("gguf_values.differing", row.name, expected=f"the source as {row.type}, bit for bit", found=counted)
    if row.type == "Q8_0" and not row.relative_error <= bound and not others and not row.unpermuted:
        yield finding("gguf_values.error", row.name, expected=f"at most {bound:.3g} of its rms", found=f"{row.relative_error:.3g}")


CHECK = Check("gguf_values", ("gguf_values",), examine)
