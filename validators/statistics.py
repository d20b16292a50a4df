"""The statistics of every tensor keep the owner's rules: a Great Expectations suite over the table of tensors (validators.suite).

A rule knows no layer and no source: what it says by itself is rarely beyond doubt, so most rules that are shipped only warn. The checks
`finite` and `values` judge what follows from the bytes. Great Expectations' own result is attached as JSON.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import pandas as pd

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.measured import is_norm, role_of
from validators.policy import UNQUANTIZED
from validators.quantization import encoded_names
from validators.suite import COLUMNS, DEFAULT_SUITE
from validators.tables import parse_shape

if TYPE_CHECKING:
    from validators.suite_run import RuleResult

ATTACHMENT = "great_expectations.json"


def examine(evidence: Evidence) -> Outcome:
    """Run the suite over the table.

    Args:
        evidence: a TensorTable, and the policy's suite if it has one.

    Returns:
        A finding per tensor and broken rule, and the number of tensors judged.

    Raises:
        RuntimeError: a rule could not be run.
    """
    from validators.suite_run import run_suite

    assert evidence.tensors is not None
    table = extend_table(evidence.tensors, encoded_names(evidence.release))
    found = run_suite(evidence.suite or DEFAULT_SUITE.read_text(encoding="utf-8"), table)
    unusable = [f"{rule.says} ({rule.error})" for rule in found.rules if rule.error]
    if unusable:
        raise RuntimeError(f"{len(unusable)} of {len(found.rules)} rules cannot be run: {unusable[0]}")
    findings = [each for rule in found.rules if not rule.success for each in _judge(rule)]
    measured = {"rules": len(found.rules), "rules broken": sum(1 for rule in found.rules if not rule.success)}
    return Outcome(tuple(findings), len(table), measured, attachments={ATTACHMENT: found.text})


def extend_table(tensors: pd.DataFrame, encoded: frozenset[str] = frozenset()) -> pd.DataFrame:
    """Return the columns that a rule may name: a TensorTable's numbers, and what rules choose rows by.

    Args:
        tensors: a TensorTable.
        encoded: names of tensors that mean nothing by themselves.

    Returns:
        A new table of COLUMNS: `role`, `kind`, `numel` and `ndim` are added.
    """
    shapes = [parse_shape(text) for text in tensors["shape"]]
    names, dtypes = tensors["name"].tolist(), tensors["dtype"].tolist()
    extended = tensors.assign(
        role=[role_of(name) for name in names],
        kind=[
            "other" if name in encoded else _kind(name, dtype, len(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ],
        numel=[prod(shape) for shape in shapes],
        ndim=[len(shape) for shape in shapes],
    )
    return extended[list(COLUMNS)]


def _kind(name: str, dtype: str, ndim: int) -> str:
    if dtype not in UNQUANTIZED:
        return "other"
    if ndim >= 2:
        return "matrix"
    if name.endswith("bias"):
        return "bias"
    return "norm" if is_norm(name) else "vector"


def _judge(rule: "RuleResult") -> Iterator[Finding]:
    code = "statistics.rule-broken" if rule.severity == "critical" else "statistics.rule-warned"
    for index, (name, found) in enumerate(rule.broken, start=1):
        count = 1 + rule.more if index == len(rule.broken) else 1
        yield replace(finding(code, name, expected=rule.says, found=found), count=count)
    if rule.observed and not rule.broken:
        yield finding(code, "all tensors", expected=rule.says, found=rule.observed)


CHECK = Check("statistics", ("bytes",), examine)
