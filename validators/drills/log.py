"""The training log and the owner's goals, as files.

Log: JSON lines, one per step and rank: `{"step": 101, "rank": 0, "loss": 4.58, "lr": [0.003], "batch": "<digest>", "rng": "<digest>",
"tokens": 48, "time": 1795990000.0}`; all but the step may be left out. A last line without its end is one that the trainer is still
writing, and no step yet. Goals: YAML, the fields of `Goals` with `declared` inside.
"""

import json
from dataclasses import fields
from math import isfinite
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from reports.errors import RequestError
from validators.drills.evidence import Step
from validators.drills.goals import Goals
from validators.drills.readiness import Declared

_STEP = TypeAdapter(Step)
_GOALS = TypeAdapter(Goals)
_REMEDY = "docs/drills.md shows what a log is."


def read_log(path: Path) -> tuple[Step, ...]:
    """Return what the trainer logged.

    Args:
        path: JSON lines.

    Returns:
        Steps by number and rank; a step logged twice (a run resumed before) counts as logged last.

    Raises:
        RequestError: a line is no step.
    """
    steps: dict[tuple[int, int], Step] = {}
    for number, line in enumerate(ended_lines(text_of(path)), 1):
        if not line.strip():
            continue
        try:
            step = _STEP.validate_python(json.loads(line))
        except ValidationError as error:
            raise RequestError(f"line {number} is no step: {_spell(error)}", where=str(path), remedy=_REMEDY) from None
        except ValueError as error:
            raise RequestError(f"line {number} is no JSON: {error}", where=str(path), remedy=_REMEDY) from None
        if min(step.step, step.rank) < 0:
            raise RequestError(f"line {number} is no step: step and rank count from 0", where=str(path), remedy=_REMEDY)
        steps[step.step, step.rank] = step
    return tuple(steps[key] for key in sorted(steps))


def text_of(path: Path, remedy: str = "", encoding: str = "utf-8") -> str:
    """Return the text of a file that an owner names.

    Args:
        path: the file.
        remedy: what to do when it is no text.
        encoding: utf-8, or utf-8-sig where spreadsheets write it.

    Returns:
        Its text.

    Raises:
        RequestError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(path), remedy="Check the path.") from None
    except UnicodeDecodeError:
        raise RequestError("is not text", where=str(path), remedy=remedy) from None


def ended_lines(text: str) -> list[str]:
    """Return the lines of a file that may still be written to.

    Args:
        text: what it holds now, JSON lines.

    Returns:
        Its lines; without the last one when neither its end nor the whole of its JSON is there yet.
    """
    lines = text.split("\n")
    return lines[:-1] if lines[-1].startswith("{") and not _is_json(lines[-1]) else lines


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def read_goals(path: Path) -> Goals:
    """Return what the owner wants.

    Args:
        path: YAML.

    Returns:
        Goals; what it does not name has no target.

    Raises:
        RequestError: not YAML, an unknown field, or a value of the wrong type, below zero or without limit.
    """
    try:
        content = yaml.safe_load(text_of(path)) or {}
    except yaml.YAMLError as error:
        raise RequestError(f"is not YAML: {_first_line(error)}", where=str(path)) from None
    if not isinstance(content, dict):
        raise RequestError("is not a mapping of goal to value", where=str(path))
    _refuse_unknown(content, path)
    try:
        goals = _GOALS.validate_python(content)
    except ValidationError as error:
        raise RequestError(_spell(error), where=str(path)) from None
    for name, value in (*_fields(goals), *_fields(goals.declared, "declared.")):
        if isinstance(value, int | float) and not (isfinite(value) and value >= 0):
            raise RequestError(f"{name} is {value}", where=str(path), remedy="Give a number from 0 on; 0 is no target.")
    return goals


def _fields(held: Goals | Declared, prefix: str = "") -> list[tuple[str, object]]:
    return [(prefix + one.name, getattr(held, one.name)) for one in fields(held)]


def _refuse_unknown(content: dict[str, object], path: Path) -> None:
    declared = content.get("declared")
    inner = declared if isinstance(declared, dict) else {}
    for prefix, given, kind in (("", content, Goals), ("declared.", inner, Declared)):
        known = {one.name for one in fields(kind)}
        unknown = sorted(map(str, {*given} - known))
        if unknown:
            names = ", ".join(f"{prefix}{name}" for name in sorted(known))
            raise RequestError(f"no goal {prefix + unknown[0]!r}", where=str(path), remedy=f"There are {names}.")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _spell(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
