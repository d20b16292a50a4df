"""Statistics rules as owners write them: a Great Expectations suite (JSON) over the table of tensors, and nothing but data.

A rule is an expectation of RULES about COLUMNS. Its severity says what a broken one means: `critical` is an error, `warning` and `info` are
warnings. Rows are chosen with a structured `row_condition`; a string would be run by pandas as code, so it is refused, as are rules that
run SQL or fetch anything.

Columns are the numbers and names of a TensorTable, and four that follow from them: `role` (the name with every index starred), `kind`
(matrix, norm, bias, vector, or other for values that are no plain floats), `numel` and `ndim`.

Source: Great Expectations 1.24, ExpectationSuite.to_json_dict() and expectations.row_conditions.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from reports.errors import RequestError
from validators.marked_text import find_line, read_marked, read_text, refuse

DEFAULT_SUITE = Path(__file__).parent / "defaults" / "statistics.json"

COLUMNS = (
    *("name", "file", "dtype", "shape", "nbytes", "absmax", "rms", "mean", "nonfinite", "zero_share", "constant", "relative_error"),
    *("role", "kind", "numel", "ndim"),
)
RULES = (
    "expect_column_values_to_be_between",
    "expect_column_values_to_be_in_set",
    "expect_column_values_to_not_be_in_set",
    "expect_column_values_to_be_null",
    "expect_column_values_to_not_be_null",
    "expect_column_values_to_be_unique",
    "expect_column_values_to_match_regex",
    "expect_column_values_to_not_match_regex",
    "expect_column_value_z_scores_to_be_less_than",
    "expect_column_pair_values_a_to_be_greater_than_b",
    "expect_column_min_to_be_between",
    "expect_column_max_to_be_between",
    "expect_column_mean_to_be_between",
    "expect_column_median_to_be_between",
    "expect_column_stdev_to_be_between",
    "expect_column_sum_to_be_between",
    "expect_table_row_count_to_be_between",
)
Severity = Literal["critical", "warning", "info"]

# Where in a suite → the keys allowed there. Keys that `ExpectationSuite.to_json_dict()` writes are all among them.
_ALLOWED: Mapping[tuple[str, ...], Sequence[str]] = MappingProxyType(
    {
        (): ("name", "id", "expectations", "meta", "notes", "suite_parameters"),
        ("expectations",): ("type", "kwargs", "severity", "notes", "meta", "description", "id"),
        ("expectations", "type"): RULES,
        ("expectations", "kwargs", "column"): COLUMNS,
        ("expectations", "kwargs", "row_condition"): (
            "type: comparison, nullity, and, or",
            "column",
            "operator",
            "parameter",
            "conditions",
        ),
    }
)


def _is_column(name: str) -> str:
    if name not in COLUMNS:
        raise ValueError(f"no column {name!r}")
    return name


def _is_rule(name: str) -> str:
    if name not in RULES:
        raise ValueError(f"{name!r} is no rule that may stand here")
    return name


def _is_structured(condition: object) -> object:
    if isinstance(condition, str):
        shape = '{"type": "comparison", "column": {"name": …}, "operator": …, "parameter": …}'
        raise ValueError(f"a string would be run as code; write {shape}")  # noqa: TRY004  (pydantic takes ValueError)
    return condition


_Column = Annotated[str, AfterValidator(_is_column)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _ColumnName(_Strict):
    name: _Column


class _Comparison(_Strict):
    type: Literal["comparison"]
    column: _ColumnName
    operator: Literal["==", "!=", "<", "<=", ">", ">=", "IN", "NOT_IN"]
    parameter: str | int | float | list[str] | list[int | float]


class _Nullity(_Strict):
    type: Literal["nullity"]
    column: _ColumnName
    is_null: bool


class _Group(_Strict):
    type: Literal["and", "or"]
    conditions: list["_Condition"]


_Condition = Annotated[_Comparison | _Nullity | _Group, Field(discriminator="type")]


class _Arguments(_Strict):
    """What a rule is given. What else it takes is Great Expectations' own to check."""

    model_config = ConfigDict(extra="allow")

    column: _Column | None = None
    column_A: _Column | None = None
    column_B: _Column | None = None
    row_condition: Annotated[_Condition | None, BeforeValidator(_is_structured)] = None


class Rule(_Strict):
    """One expectation as written."""

    type: Annotated[str, AfterValidator(_is_rule)]
    kwargs: _Arguments
    severity: Severity = "critical"
    notes: str | list[str] | None = None
    meta: dict[str, object] | None = None
    description: str | None = None
    id: str | None = None


class SuiteFile(_Strict):
    """A suite as written."""

    name: str
    id: str | None = None
    expectations: Annotated[list[Rule], Field(min_length=1)]
    meta: dict[str, object] = {}
    notes: str | list[str] | None = None
    suite_parameters: dict[str, object] = {}


def read_suite(path: Path) -> str:
    """Return the text of a suite that is known to run. Imports Great Expectations.

    Args:
        path: a JSON file.

    Returns:
        Its text.

    Raises:
        RequestError: not a suite, or a rule that cannot be run; names file and line.
    """
    from validators.suite_run import try_rules

    text = read_text(path, remedy=f"Copy {DEFAULT_SUITE} to begin with.")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}", remedy="Mend this line.") from None
    except RecursionError:
        raise RequestError("not a suite: nested without end", where=f"{path}:1", remedy="Mend the file.") from None
    root, content = read_marked(text.replace("\t", " "), path)  # JSON lets tabs indent, YAML does not
    try:
        SuiteFile.model_validate(content)
    except ValidationError as refused:
        raise refuse(refused, root, path, _ALLOWED) from None
    for index, reason in try_rules(text):
        where = f"{path}:{find_line(root, ('expectations', index))}"
        raise RequestError(f"expectations.{index} cannot be run: {reason}", where=where, remedy="Mend the rule.")
    return text
