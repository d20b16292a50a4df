"""What `--quantize` asks for: one encoding for every linear layer, or a YAML file of ordered rules.

rules: # the first whose pattern matches a released tensor's name decides
  - pattern: "model.layers.0.*"
    encoding: whole # stays as --dtype has it
    because: the first layer is sensitive
  - pattern: "*.down_proj.weight"
    encoding: int8
  - pattern: "*"
    encoding: int4
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reports.errors import RequestError, name_some

Encoding = Literal["fp8", "fp8-block", "int8", "int8-w8a8", "int4"]
Rule = tuple[str, str, str]  # pattern, encoding or "" for whole, why
_WHOLE = "whole"
_SUFFIXES = (".yaml", ".yml")


class _RuleEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: str = Field(min_length=1)
    encoding: Encoding | Literal["whole"]
    because: str = ""


class _RulesFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: list[_RuleEntry] = Field(min_length=1)


def read_rules(asked: str) -> tuple[Rule, ...]:
    """Return what is quantized how.

    Args:
        asked: an encoding, a path of a YAML file, or "" for nothing.

    Returns:
        Rules, the first that matches counts; none for "".

    Raises:
        RequestError: no such encoding, or the file is missing, not YAML, or says something unknown; the message names the place.
    """
    if not asked:
        return ()
    if asked in get_args(Encoding):
        return (("*", asked, ""),)
    if not asked.endswith(_SUFFIXES):
        raise RequestError(
            f"no encoding {asked!r}",
            where="--quantize",
            remedy=f"There are {', '.join(get_args(Encoding))}; or give a file of rules, ending in {' or '.join(_SUFFIXES)}.",
        )
    return tuple(_as_rule(entry) for entry in _read_file(Path(asked)).rules)


def _read_file(path: Path) -> _RulesFile:
    try:
        return _RulesFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(
            f"cannot be read: {error.strerror or error}", where=f"--quantize {path}", remedy="Give the file of rules."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"is not YAML: {error}", where=f"--quantize {path}", remedy="See docs/quantized.md.") from error
    except ValidationError as error:
        wrong = name_some(f"{_place(problem['loc'])}: {problem['msg']}" for problem in error.errors())
        raise RequestError(f"makes no sense at {wrong}", where=f"--quantize {path}", remedy="See docs/quantized.md.") from error


def _place(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc) or "the top"


def _as_rule(entry: _RuleEntry) -> Rule:
    return (
        (entry.pattern, "", entry.because or "the rules keep it whole") if entry.encoding == _WHOLE else (entry.pattern, entry.encoding, "")
    )
