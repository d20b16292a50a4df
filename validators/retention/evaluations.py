"""Evaluation results as files, each of one step: a plain JSON, or what lm-eval writes.

- plain: `{"step": 1000, "results": {"arc/acc": 0.41}}`, and `tokens` (consumed up to the step) and `data` (its version) if known;
- lm-eval (0.4, `results_*.json`): `{"results": {task: {"acc,none": 0.41}}, "config": {"model_args": ...}, "model_name": path}`, the
  arguments as text or as an object. It tells no step: that is read from the folder's name in the path of the model (of the adapter, where
  there is one), else in the file's own. Its `samples_*.jsonl` beside are not looked at.
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
_MODEL_ARGS = ("peft", "delta", "pretrained")  # whose paths may name the step; what was trained comes before what it was trained from


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
        steps = (_step_in(place) for place in (*_model_paths(held), str(path)))
        step = next((found for found in steps if found is not None), None)
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


def _model_paths(held: Mapping[str, Any]) -> list[str]:
    config = held.get("config")
    args = config.get("model_args") if isinstance(config, dict) else None
    if isinstance(args, str):
        args = {name.strip(): value for name, _, value in (part.partition("=") for part in args.split(","))}
    named = [args.get(name) for name in _MODEL_ARGS] if isinstance(args, dict) else []
    return [str(path) for path in (*named, held.get("model_name")) if path]


def _step_in(path: str) -> int | None:
    # The last part of a path that names one.
    matches = [match for part in PurePath(path).parts if (match := _STEP.search(part))]
    return int(matches[-1][1]) if matches else None
