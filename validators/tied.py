"""Tied embeddings: flag, key and value agree.

Tied (flag true): the head is left out, or equals the embedding. Untied (flag false): the head is there, and is not a copy of the
embedding. The flag may stand in config.json, in its `text_config`, or in both; loaders differ in which they read.
"""

from collections.abc import Iterator, Mapping

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence, Expectation
from validators.measured import Measured, compared_rows, measured_rows

FLAG = "tie_word_embeddings"


def examine(evidence: Evidence) -> Outcome:
    """Hold tie flags, stored names and values of tied pairs against each other.

    Args:
        evidence: headers and expectation; config and tables where there are some.

    Returns:
        Findings, and the number of flags and pairs judged.
    """
    expected = evidence.expected
    assert expected is not None
    top, nested = _flags(evidence.release.config)
    flag = top if top is not None else nested if nested is not None else expected.is_tied
    findings = [*_judge_flags(top, nested, flag=flag, expected=expected)]
    for kept, alias in expected.tied:
        judge = _judge_tied if flag else _judge_untied
        findings += judge(evidence, kept, alias)
    return Outcome(tuple(findings), 1 + len(expected.tied), {"flag": flag, "pairs": len(expected.tied)})


def _flags(config: Mapping[str, object]) -> tuple[bool | None, bool | None]:
    text = config.get("text_config")
    top, nested = config.get(FLAG), text.get(FLAG) if isinstance(text, Mapping) else None
    return (top if isinstance(top, bool) else None), (nested if isinstance(nested, bool) else None)


def _judge_flags(top: bool | None, nested: bool | None, *, flag: bool, expected: Expectation) -> Iterator[Finding]:
    if top is None and nested is not None:
        yield finding("tied.flag-nested-only", f"config.json: {FLAG}", expected=f"{nested}, as in text_config", found="absent")
    if top is not None and nested is not None and top != nested:
        yield finding("tied.flags-disagree", f"config.json: {FLAG}", expected=f"{top}, as at the top", found=f"text_config: {nested}")
    if flag != expected.is_tied:
        yield finding("tied.flag-wrong", f"config.json: {FLAG}", expected=f"{expected.is_tied}", found=f"{flag}")


def _judge_tied(evidence: Evidence, kept: str, alias: str) -> Iterator[Finding]:
    stored = evidence.release.by_name()
    if alias not in stored:
        return
    if kept not in stored:
        yield finding("tied.kept-missing", kept, expected="stored", found=f"only {alias} is")
        return
    first, second = _signatures(evidence, kept, alias)
    same_kind = (stored[kept].shape, stored[kept].dtype) == (stored[alias].shape, stored[alias].dtype)
    if not same_kind or (first and second and first.signature != second.signature):
        found = f"rms {second.rms:.6g} against {first.rms:.6g}" if first and second else "another shape or dtype"
        yield finding("tied.head-differs", alias, expected=f"equal to {kept}", found=found)


def _judge_untied(evidence: Evidence, kept: str, alias: str) -> Iterator[Finding]:
    if alias not in evidence.release.by_name():
        yield finding("tied.head-missing", alias, expected="stored, for the config does not tie it", found="absent")
        return
    first, second = _signatures(evidence, kept, alias)
    if first and second and first.is_telling and first.signature == second.signature:
        proven = {row.name for row in compared_rows(evidence.values) if row.differing == 0}
        code = "tied.source-head-is-embedding" if {kept, alias} <= proven else "tied.head-is-embedding"
        yield finding(code, alias, expected="values of its own", found=f"those of {kept}")


def _signatures(evidence: Evidence, kept: str, alias: str) -> tuple[Measured | None, Measured | None]:
    rows = {row.name: row for row in measured_rows(evidence.tensors)}
    return rows.get(kept), rows.get(alias)


CHECK = Check("tied", ("family",), examine)
