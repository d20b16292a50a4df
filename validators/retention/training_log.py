"""The training log as the ledger reads it: one line per step, with loss, consumed tokens and data version, from three kinds of file.

- JSON lines, one per step and rank, as drills read them; `tokens` are those of the line's own step and rank, `consumed_tokens` those of
  all steps and ranks up to it, `data` names the version of the data.
- Hugging Face Trainer's `trainer_state.json` (transformers 5.24, trainer_callback.py): the entries of `log_history` that have a loss.
- CSV with a header: `step`, and any of `loss`, `tokens`, `consumed_tokens`, `data`.

NAMES lists how trainers spell these; in CSV, in any case. A last line without its end is still being written, and is not read.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reports.errors import RequestError
from validators.drills.log import ended_lines, text_of

_REMEDY = "docs/retention.md shows what a log may be."


# Field → how it is spelled; the first that is there counts
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "step": ("step", "global_step", "iteration"),
        "rank": ("rank", "dp_rank"),
        "loss": ("loss", "train_loss", "train/loss", "lm loss", "lm_loss"),
        "tokens": ("tokens",),
        "consumed_tokens": ("consumed_tokens", "tokens_seen", "ntokens_seen", "num_input_tokens_seen", "num_tokens_seen"),
        "data": ("data", "data_version", "dataset_version"),
    }
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One step: mean loss over ranks, tokens consumed up to and with it (0: nobody tells), data version, and where."""

    step: int
    loss: float | None = None
    consumed: int = 0
    data: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    rank: int
    loss: float | None
    tokens: int
    consumed: int
    data: str
    where: str


def read_training_log(path: Path, tokens_per_step: int = 0) -> tuple[LogLine, ...]:
    """Return what a run logged.

    Args:
        path: JSON lines, trainer_state.json, or CSV; told apart by name.
        tokens_per_step: for logs that count no tokens; 0 when nobody knows.

    Returns:
        A line per step, in order. A step that was logged again, by a run that had gone back, counts as logged last.

    Raises:
        RequestError: the file cannot be read, holds no step, or a line is none.
    """
    text = text_of(path, _REMEDY, "utf-8-sig")
    kind = next((read for ending, read in _READERS.items() if path.name.lower().endswith(ending)), _json_lines)
    try:
        rows = list(kind(text, path))
    except csv.Error as error:  # a quote that nothing closes, in a long file
        raise RequestError(f"is no CSV: {error}", where=str(path), remedy=_REMEDY) from None
    if not rows:
        raise RequestError("holds no step", where=str(path), remedy=f"Give a log that has begun. {_REMEDY}")
    return _count_tokens(_by_step(rows), tokens_per_step)


def _json_lines(text: str, path: Path) -> Iterator[_Row]:
    for number, line in enumerate(ended_lines(text), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                held = json.loads(line)
            except ValueError:
                raise RequestError("is no JSON", where=where, remedy=_REMEDY) from None
            yield _row(held, where)


def _trainer_state(text: str, path: Path) -> Iterator[_Row]:
    try:
        held = json.loads(text)
        history = held["log_history"]
    except (ValueError, KeyError, TypeError):
        raise RequestError("is no state of Trainer: it has no log_history", where=str(path), remedy=_REMEDY) from None
    for number, entry in enumerate(history):
        if isinstance(entry, dict) and "loss" in entry:
            yield _row(entry, f"{path}:log_history[{number}]")


def _csv(text: str, path: Path) -> Iterator[_Row]:
    rows = csv.reader(io.StringIO(text))
    header = next(rows, [])
    names = [name.strip().lower() for name in header]
    if not set(NAMES["step"]) & set(names):
        raise RequestError(f"has no column 'step', only {', '.join(header) or 'nothing'}", where=str(path), remedy=_REMEDY)
    last = text.count("\n") + 1  # the line that has no end
    for cells in rows:
        is_being_written = rows.line_num == last and len(cells) < len(names)
        if cells and not is_being_written:
            yield _row({name: cell for name, cell in zip(names, cells, strict=False) if cell.strip()}, f"{path}:{rows.line_num}")


# How a file's name ends → what reads it; JSON lines otherwise
_READERS: Mapping[str, Callable[[str, Path], Iterator[_Row]]] = MappingProxyType({"trainer_state.json": _trainer_state, ".csv": _csv})


def _row(held: Any, where: str) -> _Row:  # noqa: ANN401  # what JSON gives
    if not isinstance(held, dict):
        raise RequestError("is no step of a log: not an object with names", where=where, remedy=_REMEDY)
    told = {field: held[name] for field, names in NAMES.items() for name in names[::-1] if held.get(name) is not None}
    if "step" not in told:
        raise RequestError(f"is no step of a log: it has none of {', '.join(NAMES['step'])}", where=where, remedy=_REMEDY)
    return _Row(
        _count(told, "step", where),
        _count(told, "rank", where),
        _number(told, "loss", where) if "loss" in told else None,
        _count(told, "tokens", where),
        _count(told, "consumed_tokens", where),
        str(told.get("data", "")),
        where,
    )


def _count(told: Mapping[str, Any], field: str, where: str) -> int:
    value = told.get(field, 0)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)  # exact where a float would round
    number = value if type(value) is int else _number(told, field, where)
    if number < 0 or (isinstance(number, float) and not number.is_integer()):
        raise RequestError(f"is no step of a log: {field} {value!r} is no whole number of at least 0", where=where, remedy=_REMEDY)
    return int(number)


def _number(told: Mapping[str, Any], field: str, where: str) -> float:
    value = told[field]
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass  # no number either
    raise RequestError(f"is no step of a log: {field} {value!r} is no number", where=where, remedy=_REMEDY)


def _by_step(rows: list[_Row]) -> list[tuple[LogLine, int]]:
    steps: dict[int, dict[int, _Row]] = {}
    for row in rows:
        steps.setdefault(row.step, {})[row.rank] = row
    return [_merge(list(steps[step].values())) for step in sorted(steps)]


def _merge(rows: list[_Row]) -> tuple[LogLine, int]:
    losses = [row.loss for row in rows if row.loss is not None]
    line = LogLine(
        rows[0].step,
        sum(losses) / len(losses) if losses else None,
        max(row.consumed for row in rows),
        next((row.data for row in rows if row.data), ""),
        rows[0].where,
    )
    return line, sum(row.tokens for row in rows)


def _count_tokens(lines: list[tuple[LogLine, int]], tokens_per_step: int) -> tuple[LogLine, ...]:
    # Cumulative from the lines' own tokens while no step is missing; behind a gap only what is stated counts.
    counted, total, expected = [], 0, 1
    for line, tokens in lines:
        is_whole = line.step == expected and tokens > 0
        total, expected = (total + tokens, expected + 1) if is_whole else (0, -1)
        told = line.consumed or tokens_per_step * line.step or (total if is_whole else 0)
        counted.append(replace(line, consumed=told))
    return tuple(counted)
