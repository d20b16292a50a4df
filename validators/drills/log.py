"""The training log and the owner's goals, as files.

Log: JSON lines, one per step and rank: `{"step": 101, "rank": 0, "loss": 4.58, "lr": [0.003], "batch": "<digest>", "rng": "<digest>",
"tokens": 48, "time": 1795990000.0}`; all but step and rank may be left out. Goals: YAML, the fields of `Goals` with `declared` inside.
"""

import json
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from reports.errors import RequestError
from validators.drills.evidence import Step
from validators.drills.goals import Goals

_STEP = TypeAdapter(Step)
_GOALS = TypeAdapter(Goals)
_REMEDY = "docs/drills.md shows a line of the log."


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
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step = _STEP.validate_python(json.loads(line))
        except ValidationError as error:
            problem = error.errors()[0]
            told = f"{'.'.join(map(str, problem['loc'])) or 'the line'}: {problem['msg']}"
            raise RequestError(f"line {number} is no step: {told}", where=str(path), remedy=_REMEDY) from None
        except ValueError as error:
            if number == len(lines):
                break  # it has no end: the trainer is writing it
            raise RequestError(f"line {number} is no JSON: {error}", where=str(path), remedy=_REMEDY) from None
        steps[step.step, step.rank] = step
    return tuple(steps[key] for key in sorted(steps))


def read_goals(path: Path) -> Goals:
    """Return what the owner wants.

    Args:
        path: YAML.

    Returns:
        Goals; what it does not name has no target.

    Raises:
        RequestError: not YAML, an unknown field, or a value of the wrong type.
    """
    try:
        content = yaml.safe_load(_text(path)) or {}
    except yaml.YAMLError as error:
        raise RequestError(f"is not YAML: {_first_line(error)}", where=str(path)) from None
    if not isinstance(content, dict):
        raise RequestError("is not a mapping of goal to value", where=str(path))
    _refuse_unknown(content, path)
    try:
        return _GOALS.validate_python(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise RequestError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", where=str(path)) from None


def _refuse_unknown(content: dict[str, object], path: Path) -> None:
    known = set(Goals.__dataclass_fields__)
    declared = content.get("declared", {})
    inner = set(type(Goals().declared).__dataclass_fields__)
    unknown = sorted({*content} - known) + sorted(({*declared} if isinstance(declared, dict) else set()) - inner)
    if unknown:
        raise RequestError(f"no goal {unknown[0]!r}", where=str(path), remedy=f"There are {', '.join(sorted(known | inner))}.")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot be read: {error.strerror}", where=str(path), remedy="Check the path.") from None
    except UnicodeDecodeError:
        raise RequestError("is not text", where=str(path)) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
