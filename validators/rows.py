"""Rows of the token embedding and the head: each token that the tokenizer can produce has one of its own, and it is not zero.

A *reachable* row is one whose id the tokenizer can produce. Those of special, added and reserved tokens (`<|reserved_7|>`, `[unused3]`)
may honestly be untrained, and that of the padding token is zero by torch's own rule; rows behind the last id are padding. Without a
tokenizer, zeros at the end are padding, and other rows could be anything.

Which rows are zero or equal is measured on bits (validators.sampled). What an exact comparison finds in the source too is only said.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding, Measure
from validators.check import Check, Outcome, attempt, has_tokenizer
from validators.config import read_field
from validators.expectation import Evidence
from validators.measured import Measured, compared_rows, measured_rows
from validators.policy import REPEATED_BLOCK_ROWS
from validators.quantization import encoded_names
from validators.sampled import ZERO_ROW, Run, read_repeated
from validators.tables import parse_shape
from validators.token_files import content_of
from validators.vocabulary import parse_object, read_settings, read_vocabulary

# What the families' modules are called that have one row per token; for a release whose family is not known.
_MODULES = frozenset({"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "lm_head", "embed_out", "output"})
_RESERVED = re.compile(r"^(<.+>|\[.+\])$|unused|reserved|madeup")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What is known of ids. Without a tokenizer `by_id` and `special` (special, added and reserved tokens) are empty."""

    by_id: Mapping[int, str] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    padding: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Rows:
    """One matrix with a row per token. `count` rows, of which `runs` are zero or repeat."""

    name: str
    count: int
    runs: Sequence[Run]

    def zeros(self) -> list[int]:
        return [row for run in self.runs if run.origin == ZERO_ROW for row in range(run.start, run.stop)]

    def blocks(self) -> list[Run]:
        return [run for run in self.runs if run.step == 1 and run.count >= REPEATED_BLOCK_ROWS]

    def copies(self) -> list[int]:
        blocks = self.blocks()
        return [row for run in self.runs if run.origin != ZERO_ROW and run not in blocks for row in range(run.start, run.stop)]


def examine(evidence: Evidence) -> Outcome:
    """Judge zero and repeated rows of embedding and head.

    Args:
        evidence: a TensorTable; tokenizer, config, expectation and a ValueTable where there are some.

    Returns:
        Findings, and the number of rows looked at; where no matrix has a row per token, of tensors.
    """
    assert evidence.tensors is not None
    rows, repeated = measured_rows(evidence.tensors), read_repeated(evidence.tensors)
    encoded = encoded_names(evidence.release)
    whole = [row for row in rows if row.name not in encoded and _is_vocabulary(row, evidence)]
    matrices = [_Rows(row.name, parse_shape(row.shape)[0], repeated.get(row.name, ())) for row in whole]
    tokens = _tokens(evidence)
    proven = frozenset(row.name for row in compared_rows(evidence.values) if row.differing == 0)
    findings = [
        *(found for matrix in matrices for found in _judge_zeros(matrix, tokens, is_proven=matrix.name in proven)),
        *(found for matrix in matrices for found in _judge_repeated(matrix, tokens, is_proven=matrix.name in proven)),
    ]
    largest = max((matrix.count for matrix in matrices), default=0)
    measured: dict[str, Measure] = {
        "matrices": len(matrices),
        "zero_rows": sum(len(matrix.zeros()) for matrix in matrices),
        "repeated_rows": sum(run.count for matrix in matrices for run in matrix.runs if run.origin != ZERO_ROW),
    }
    if tokens.by_id:
        measured["padding_rows"] = max(0, largest - max(tokens.by_id) - 1)
    return Outcome(tuple(findings), sum(matrix.count for matrix in matrices) or len(rows), measured)


def _is_vocabulary(row: Measured, evidence: Evidence) -> bool:
    if len(parse_shape(row.shape)) != 2 or row.is_zero:  # a matrix of zeros is the finite check's
        return False
    if evidence.expected is not None:
        return row.name in (evidence.expected.embedding, evidence.expected.head)
    return row.name.endswith(".weight") and row.name.split(".")[-2] in _MODULES


def _tokens(evidence: Evidence) -> _Tokens:
    folder, pad = evidence.release.assets, read_field(evidence.release.config, "pad_token_id")
    padding = frozenset({pad} if isinstance(pad, int) else ())
    read = attempt(lambda: _read_tokens(folder, padding)) if folder is not None and has_tokenizer(folder) else None
    return read if isinstance(read, _Tokens) else _Tokens(padding=padding)  # unreadable: the tokenizer check says so


def _read_tokens(folder: Path, padding: frozenset[int]) -> _Tokens:
    settings = read_settings(folder)
    ids = read_vocabulary(folder, settings)
    added = parse_object(folder / "tokenizer.json").get("added_tokens")
    special = {str(token.get("content")) for token in (added if isinstance(added, list) else []) if isinstance(token, Mapping)}
    special |= set(parse_object(folder / "added_tokens.json"))
    named = content_of(settings.get("pad_token"))
    pad = None if named is None else ids.get(named)
    return _Tokens(
        {index: token for token, index in ids.items()},
        frozenset(index for token, index in ids.items() if token in special or _RESERVED.match(token)),
        padding if pad is None else padding | {pad},
    )


def _judge_zeros(matrix: _Rows, tokens: _Tokens, *, is_proven: bool) -> Iterator[Finding]:
    zeros = [row for row in matrix.zeros() if row not in tokens.padding]
    if tokens.by_id:
        ordinary = [row for row in zeros if row in tokens.by_id and row not in tokens.special]
        unsure = [row for row in zeros if row in tokens.special]
    else:
        inside = [row for row in zeros if row < matrix.count - _trailing(zeros, matrix.count)]
        ordinary, unsure = [], inside if len(inside) > 1 else []  # a single one is the padding token's, most likely
    for code, rows in (("rows.source" if is_proven else "rows.zero", ordinary), ("rows.zero-reserved", unsure)):
        if rows:
            found = f"{len(rows)} rows of zeros: {_name_rows(rows, tokens)}"
            yield finding(code, matrix.name, expected="values for every token", found=found)


def _trailing(rows: Sequence[int], count: int) -> int:
    # How many of the last rows are among `rows`, which ascend.
    length = 0
    for row in reversed(rows):
        if row != count - 1 - length:
            break
        length += 1
    return length


def _judge_repeated(matrix: _Rows, tokens: _Tokens, *, is_proven: bool) -> Iterator[Finding]:
    for run in matrix.blocks():
        reachable = [row for row in range(run.start, run.stop) if not tokens.by_id or row in tokens.by_id]
        if len(reachable) >= REPEATED_BLOCK_ROWS:
            found = f"rows {run.start} to {run.stop - 1} are rows {run.origin} to {run.origin + run.count - 1}"
            yield finding("rows.source" if is_proven else "rows.block", matrix.name, expected="a row of its own per token", found=found)
    copies = [row for row in matrix.copies() if row in tokens.by_id and row not in tokens.special and row not in tokens.padding]
    if copies:
        found = f"{len(copies)} equal an earlier row: {_name_rows(copies, tokens)}"
        yield finding("rows.equal", matrix.name, expected="a row of its own per token", found=found)


def _name_rows(rows: Sequence[int], tokens: _Tokens) -> str:
    return name_some(f"{row} {tokens.by_id[row]!r}" if row in tokens.by_id else f"{row}" for row in rows)


CHECK = Check("rows", ("bytes",), examine)
