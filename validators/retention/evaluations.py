"""Evaluation results as files, each of one step: a plain JSON, or what lm-eval writes.

- plain: `{"step": 1000, "results": {"arc/acc": 0.41}}`, and `tokens` (consumed up to the step) and `data` (its version) if known;
- lm-eval (0.4, `results_*.json`): `{"results": {task: {"acc,none": 0.41}}, "config": {...}, "model_name": path}`. It tells no step: that
  is read from the folder's name in the model's path, else in the file's own.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from reports.errors import RequestError

_REMEDY = 'Give {"step": N, "results": {name: value}}, or a file that lm-eval wrote.'
_STEP = re.compile(r"(?:^|[-_=.])(?:step|global_step|checkpoint|iter|ckpt)[-_=]?0*(\d+)", re.IGNORECASE)
_PRETRAINED = re.compile(r"(?:^|,)pretrained=([^,]+)")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One file of results. `step` is None where nothing tells it; `tokens` 0 and `data` "" where they are not said."""

    where: str
    step: int | None
    results: Mapping[str, float]
    tokens: int = 0
    data: str = ""


def read_evaluations(paths: list[Path]) -> tuple[Evaluation, ...]:
    """Return evaluation results.

    Args:
        paths: files, and folders that are searched for *.json at every depth.

    Returns:
        Results by step, those without one first.

    Raises:
        RequestError: a path named is absent, a file named holds no results, or one is no JSON.
    """
    found = {path: [one for file in _files(path) if (one := _read(file)) is not None] for path in paths}
    for path, here in found.items():
        if not here and path.is_file():  # a folder may have none yet
            raise RequestError("holds no results", where=str(path), remedy=_REMEDY)
    held = [one for here in found.values() for one in here]
    return tuple(sorted(held, key=lambda one: (-1 if one.step is None else one.step, one.where)))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.json"))
    if not path.is_file():
        raise RequestError("does not exist", where=str(path), remedy="Check the path.")
    return [path]


def _read(path: Path) -> Evaluation | None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"is no JSON ({error})", where=str(path), remedy=_REMEDY) from None
    if not isinstance(held, dict) or not isinstance(held.get("results"), dict):
        return None  # a configuration beside the results, say
    step = held.get("step")
    if step is None:
        step = _step_in(_model_path(held)) if _model_path(held) else None
        step = step if step is not None else _step_in(str(path))
    elif isinstance(step, bool) or not isinstance(step, int | float) or step < 0 or step % 1 != 0:
        raise RequestError(f"step is {step!r}, no whole number of at least 0", where=str(path), remedy=_REMEDY)
    else:
        step = int(step)
    tokens = held.get("tokens", 0)
    return Evaluation(
        str(path), step, dict(_numbers("", held["results"])), tokens if type(tokens) is int else 0, str(held.get("data") or "")
    )


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}" if name else str(key), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _model_path(held: Mapping[str, Any]) -> str:
    config = held.get("config") if isinstance(held.get("config"), dict) else {}
    args = config.get("model_args")  # type: ignore[union-attr]  # a dict, as the line above made sure
    if isinstance(args, dict):
        return str(args.get("pretrained", ""))
    match = _PRETRAINED.search(args) if isinstance(args, str) else None
    return match[1] if match else str(held.get("model_name") or "")


def _step_in(path: str) -> int | None:
    # The last part of a path that names one.
    matches = [match for part in PurePath(path).parts if (match := _STEP.search(part))]
    return int(matches[-1][1]) if matches else None
