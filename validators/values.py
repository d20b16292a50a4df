"""Every released tensor equals, bit for bit, what a second reading of the source says it must be after the declared mapping and cast.

A tensor that differs is looked for elsewhere: its checksum among those that other tensors should have (exchanged), its statistics among
those that other tensors have (copied). Quantized weights are the `quantized` check's.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isnan, prod

from reports.codes import finding
from reports.model import Finding, Measure
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.measured import Compared, Signature, compared_rows, measured_rows
from validators.policy import FLUSHED_SHARE
from validators.shapes import whole_tensors
from validators.tables import SECOND_COPY, parse_shape


def examine(evidence: Evidence) -> Outcome:
    """Judge the value-by-value comparison of every tensor.

    Args:
        evidence: headers and a ValueTable; a TensorTable where there is one.

    Returns:
        Findings, and the number of stored tensors that were compared whole.
    """
    compared: dict[str, list[Compared]] = defaultdict(list)
    for row in compared_rows(evidence.values):
        compared[row.name].append(row)
    stored = whole_tensors(evidence.release)
    rows = [row for group in compared.values() for row in group]
    findings = [
        *(found for tensor in stored for found in _judge_coverage(tensor.name, tensor.shape, compared.get(tensor.name, ()))),
        *_judge_values(rows, evidence),
        *(found for row in rows for found in _judge_flushed(row)),
    ]
    measured: dict[str, Measure] = {
        "compared": sum(row.numel for row in rows),
        "differing": sum(row.differing for row in rows),
        "flushed": sum(row.flushed for row in rows),
        "flushed_share": max((row.flushed / row.numel for row in rows if row.numel), default=0.0),
        "witnesses": ", ".join(sorted({row.witness for row in rows})),
    }
    limits = {"differing": 0, "flushed_share": FLUSHED_SHARE}
    held = [tensor.name for tensor in stored] if stored else list(compared)  # of a GGUF file, the values it was made from are compared
    return Outcome(tuple(findings), sum(name in compared for name in held), measured, limits)


def _judge_coverage(name: str, shape: tuple[int, ...], rows: Sequence[Compared]) -> Iterator[Finding]:
    numel = prod(shape)
    if not rows:
        yield finding("values.not-compared", name, expected=f"{numel} elements compared", found="none: the source has no such tensor")
    elif max(row.numel for row in rows) != numel:
        yield finding("values.partial", name, expected=f"{numel} elements compared", found=f"{max(row.numel for row in rows)}")


def _judge_values(rows: Sequence[Compared], evidence: Evidence) -> Iterator[Finding]:
    wanted, unlike = _names_by_crc(rows), _unlike_planned(evidence)
    signatures = {row.name: row.signature for row in measured_rows(evidence.tensors) if row.is_telling}
    holders: dict[Signature, list[str]] = defaultdict(list)
    for name, signature in signatures.items():
        holders[signature].append(name)
    for row in rows:
        if row.differing == 0:
            continue
        others = [name for name in wanted.get(row.found_crc32, ()) if name != row.name]
        copies = [name for name in holders.get(signatures[row.name], ()) if name != row.name] if row.name in signatures else []
        if row.witness == SECOND_COPY:
            found = f"{row.differing} of {row.numel} differ once rounded{_most(row)}, first at {row.first}"
            yield finding("values.copy-differs", row.name, expected="rounded, the checkpoint's copy in training precision", found=found)
        elif others:
            yield finding("values.exchanged", row.name, expected="its own values", found=f"those of {others[0]}")
        elif copies:
            yield finding("values.duplicated", row.name, expected="its own values", found=f"the same as {copies[0]}")
        else:
            counted = f"{row.differing} of {row.numel} differ{_most(row)}, first at {row.first}"
            found = unlike.get(row.name, counted) if isnan(row.max_abs) else counted
            yield finding("values.differing", row.name, expected=f"bit-equal to {row.witness}", found=found)


def _unlike_planned(evidence: Evidence) -> Mapping[str, str]:
    # What is said of a tensor that could not be compared, since it has another dtype or shape than planned.
    if evidence.plan is None:
        return {}
    plan, stored = evidence.plan, evidence.release.by_name()
    planned = {name: (dtype, parse_shape(shape)) for name, dtype, shape in zip(plan["name"], plan["dtype"], plan["shape"], strict=True)}
    return {
        name: f"stored as {held.dtype} {held.shape}, planned {dtype} {shape}"
        for name, (dtype, shape) in planned.items()
        if (held := stored.get(name)) is not None and (held.dtype, held.shape) != (dtype, shape)
    }


def _most(row: Compared) -> str:
    return "" if isnan(row.max_abs) else f", by at most {row.max_abs:.3g}"  # a NaN against a number, or a tensor not compared


def _names_by_crc(rows: Sequence[Compared]) -> Mapping[int, Sequence[str]]:
    wanted: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        if row.expected_crc32 >= 0:
            wanted[row.expected_crc32].append(row.name)
    return wanted


def _judge_flushed(row: Compared) -> Iterator[Finding]:
    allowed = FLUSHED_SHARE * row.numel + 1  # one element always may: small tensors would fail on a single one
    if row.flushed > allowed:
        found = f"{row.flushed} of {row.numel} became zero"
        yield finding("values.flushed", row.name, expected=f"at most {FLUSHED_SHARE:g} of the values", found=found)


CHECK = Check("values", ("values",), examine)
