"""The lines of a training log, as three kinds of file have them, in the order in which they were written.

- JSON lines, one per step and rank, as drills read them; `tokens` are those of the line's own step and rank, `consumed_tokens` those of
  all steps and ranks up to it, `data` names the version of the data.
- Hugging Face Trainer's `trainer_state.json` (transformers 5.24, trainer_callback.py): the entries of `log_history` that have a loss.
- CSV with a header: `step`, and any of `loss`, `tokens`, `consumed_tokens`, `data`.

NAMES lists how trainers spell these; in CSV, in any case. A last line without its end is still being written, and is not read; of JSON
lines it is, where its JSON is whole: a number of a CSV may lack digits, and nothing would tell.

Source of torchtitan's names: pytorch/torchtitan, train.py (`n_tokens_seen`, summed over the mesh) and components/metrics.py.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from reports.errors import RequestError
from validators.drills.log import ended_lines, text_of

REMEDY = "docs/retention.md shows what a log may be."


# Field → how it is spelled; the first that is there counts
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "step": ("step", "global_step", "iteration"),
        "rank": ("rank", "dp_rank"),
        "loss": ("loss", "train_loss", "train/loss", "lm loss", "lm_loss", "loss_metrics/global_avg_loss"),
        "tokens": ("tokens",),
        "consumed_tokens": ("consumed_tokens", "tokens_seen", "ntokens_seen", "n_tokens_seen", "num_input_tokens_seen", "num_tokens_seen"),
        "data": ("data", "data_version", "dataset_version"),
    }
)


class Row(NamedTuple):
    """What one line tells: None, 0 and "" are "not told"."""

    step: int
    rank: int
    loss: float | None
    tokens: int
    consumed: int
    data: str
    where: str

    def tells_training(self) -> bool:
        """Return whether it is of training, and not of an evaluation beside it, say.

        Returns:
            Whether it tells a loss, tokens, or the version of the data.
        """
        return self.loss is not None or self.tokens > 0 or self.consumed > 0 or self.data != ""

    def repeats(self, earlier: "Row") -> bool:
        """Return whether it tells anew what an earlier line of the same step and rank told.

        Args:
            earlier: that line.

        Returns:
            Whether both tell the loss, or both tokens. An evaluation may state again the count that stands beside a loss: that is no
            repetition.
        """
        is_loss = self.loss is not None and earlier.loss is not None
        is_count = min(self.consumed, earlier.consumed) > 0 and (earlier.loss is None or self.consumed != earlier.consumed)
        return is_loss or is_count or min(self.tokens, earlier.tokens) > 0

    def over(self, earlier: "Row | None") -> "Row":
        """Return the two as one line.

        Args:
            earlier: a line of the same step and rank; None where there is none.

        Returns:
            What it tells, and what the earlier one tells besides.
        """
        if earlier is None:
            return self
        loss = earlier.loss if self.loss is None else self.loss
        told = (self.tokens or earlier.tokens, self.consumed or earlier.consumed, self.data or earlier.data)
        return Row(self.step, self.rank, loss, *told, self.where)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield what a log's lines tell.

    Args:
        path: JSON lines, trainer_state.json, or CSV; told apart by name.

    Yields:
        Rows, as written.

    Raises:
        RequestError: the file cannot be read, or a line is none.
    """
    text = text_of(path, REMEDY, "utf-8-sig")
    kind = next((read for ending, read in _READERS.items() if path.name.lower().endswith(ending)), _json_lines)
    try:
        yield from kind(text, path)
    except csv.Error as error:  # a quote that nothing closes, in a long file
        raise RequestError(f"is no CSV: {error}", where=str(path), remedy=REMEDY) from None


def _json_lines(text: str, path: Path) -> Iterator[Row]:
    for number, line in enumerate(ended_lines(text), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                held = json.loads(line)
            except ValueError:
                raise RequestError("is no JSON", where=where, remedy=REMEDY) from None
            yield _row(held, where)


def _trainer_state(text: str, path: Path) -> Iterator[Row]:
    try:
        held = json.loads(text)
        history = held["log_history"]
    except (ValueError, KeyError, TypeError):
        raise RequestError("is no state of Trainer: it has no log_history", where=str(path), remedy=REMEDY) from None
    for number, entry in enumerate(history):
        if isinstance(entry, dict) and "loss" in entry:
            yield _row(entry, f"{path}:log_history[{number}]")


def _csv(text: str, path: Path) -> Iterator[Row]:
    ended = text[: text.rfind("\n") + 1] or text
    rows = csv.reader(io.StringIO(ended))
    header = next(rows, [])
    names = [name.strip().lower() for name in header]
    if not set(NAMES["step"]) & set(names):
        raise RequestError(f"has no column 'step', only {', '.join(header) or 'nothing'}", where=str(path), remedy=REMEDY)
    for cells in rows:
        if cells:
            yield _row({name: cell for name, cell in zip(names, cells, strict=False) if cell.strip()}, f"{path}:{rows.line_num}")


# How a file's name ends → what reads it; JSON lines otherwise
_READERS: Mapping[str, Callable[[str, Path], Iterator[Row]]] = MappingProxyType({"trainer_state.json": _trainer_state, ".csv": _csv})


def _row(held: Any, where: str) -> Row:  # noqa: ANN401  # what JSON gives
    if not isinstance(held, dict):
        raise RequestError("is no step of a log: not an object with names", where=where, remedy=REMEDY)
    told = {field: held[name] for field, name in _known(tuple(held)) if held[name] is not None}
    if "step" not in told:
        raise RequestError(f"is no step of a log: it has none of {', '.join(NAMES['step'])}", where=where, remedy=REMEDY)
    return Row(
        _count(told, "step", where),
        _count(told, "rank", where),
        _number(told, "loss", where) if "loss" in told else None,
        _count(told, "tokens", where),
        _count(told, "consumed_tokens", where),
        str(told.get("data", "")),
        where,
    )


@lru_cache(maxsize=64)  # the lines of a log have few sets of names
def _known(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    # Field and name of what is there; the one that counts comes last.
    return tuple((field, name) for field, spelled in NAMES.items() for name in spelled[::-1] if name in names)


def _count(told: Mapping[str, Any], field: str, where: str) -> int:
    value = told.get(field, 0)
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)  # exact where a float would round
    number = value if type(value) is int else _number(told, field, where)
    if number < 0 or (isinstance(number, float) and not number.is_integer()):
        raise RequestError(f"is no step of a log: {field} {value!r} is no whole number of at least 0", where=where, remedy=REMEDY)
    return int(number)


def _number(told: Mapping[str, Any], field: str, where: str) -> float:
    value = told[field]
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass  # no number either
    raise RequestError(f"is no step of a log: {field} {value!r} is no number", where=where, remedy=REMEDY)
