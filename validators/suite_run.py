"""Run a statistics suite with Great Expectations. Importing this takes seconds: import it inside a function, where a suite is run.

The library works on an ephemeral context: it stores nothing, fetches nothing and shows no progress. Its analytics are off.

Source: Great Expectations 1.24, result format SUMMARY with unexpected_index_column_names.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import great_expectations as gx
import pandas as pd
from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults

from validators.check import MAX_FINDINGS_PER_CODE, MAX_REASON_LENGTH, attempt

KEY = "name"  # the column that says which tensor a broken row is
# One row of every column, for finding out whether a rule can be run at all.
_SAMPLE = {
    **{"name": "a.0.weight", "file": "a.safetensors", "dtype": "F32", "shape": "2x2", "nbytes": 16, "absmax": 1.0, "rms": 0.5, "mean": 0.0},
    **{
        "nonfinite": 0,
        "zero_share": 0.0,
        "constant": 0,
        "relative_error": 0.0,
        "role": "a.*.weight",
        "kind": "matrix",
        "numel": 4,
        "ndim": 2,
    },
}
_INDEX = "shardwright_rule"  # key of a rule's meta
# Of broken rows the first ones and their number: the lists of 10^5 rows take half a minute to make.
_WANTED = {
    "result_format": "SUMMARY",
    "partial_unexpected_count": MAX_FINDINGS_PER_CODE,
    "unexpected_index_column_names": [KEY],
    "return_unexpected_index_query": False,
}
_LEFT_OUT = frozenset({"batch_markers", "exception_traceback"})  # clocks, paths of this machine


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What became of one rule.

    `broken` are (tensor, what it has) of the first MAX_FINDINGS_PER_CODE rows, `more` how many follow. Of a rule about a whole column,
    `observed` is what was found, "" where no row was chosen. `error` says why a rule could not be run.
    """

    says: str
    severity: str
    success: bool
    broken: tuple[tuple[str, str], ...] = ()
    more: int = 0
    observed: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What became of a suite: its rules, in order, and the library's own result as JSON text."""

    rules: tuple[RuleResult, ...]
    text: str


def run_suite(text: str, table: pd.DataFrame) -> SuiteResult:
    """Run a suite over a table.

    Args:
        text: a suite, as validators.suite reads it.
        table: a row per tensor.

    Returns:
        What became of each rule.
    """
    content = json.loads(text)
    rules = [{**rule, "meta": {_INDEX: index}} for index, rule in enumerate(content["expectations"])]
    asset = _open_context().data_sources.add_pandas("release").add_dataframe_asset("tensors")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": table})
    suite = gx.ExpectationSuite(name=content["name"], expectations=rules)
    found = batch.validate(suite, result_format=_WANTED).to_json_dict()
    found["results"].sort(key=lambda result: result["expectation_config"]["meta"][_INDEX])  # it puts what failed first
    read = tuple(_read(rule, result) for rule, result in zip(rules, found["results"], strict=True))
    return SuiteResult(read, json.dumps(_storable(found), indent=1))


def try_rules(text: str) -> Iterator[tuple[int, str]]:
    """Run each rule of a suite on a sample.

    Args:
        text: a suite.

    Yields:
        The index of a rule that cannot be run, and why.
    """
    table = pd.DataFrame([_SAMPLE])
    for index, rule in enumerate(json.loads(text)["expectations"]):
        alone = json.dumps({"name": "sample", "expectations": [rule]})
        ran = attempt(partial(run_suite, alone, table))
        reason = str(ran) if isinstance(ran, Exception) else ran.rules[0].error
        if reason:
            yield index, " ".join(reason.split())[:MAX_REASON_LENGTH]


def _open_context() -> Any:  # noqa: ANN401  (the library's types are not seen here)
    memory = InMemoryStoreBackendDefaults(init_temp_docs_sites=False)
    config = DataContextConfig(store_backend_defaults=memory, analytics_enabled=False, progress_bars={"globally": False})
    return gx.get_context(mode="ephemeral", project_config=config)


def _read(rule: Mapping[str, Any], result: Mapping[str, Any]) -> RuleResult:
    says, severity, found = _spell_rule(rule), rule.get("severity", "critical"), result["result"]
    rows = found.get("partial_unexpected_index_list") or []
    error = _find_error(result["exception_info"])
    if not (error or result["success"] or rows or "observed_value" in found):
        error = "it failed and names no tensor"
    if error:
        return RuleResult(says, severity, False, error=error)
    broken = tuple((row[KEY], ", ".join(f"{column} {_spell(value)}" for column, value in row.items() if column != KEY)) for row in rows)
    observed = found.get("observed_value")
    more = found.get("unexpected_count", 0) - len(rows)
    return RuleResult(says, severity, result["success"], broken, more, "" if observed is None else _spell(observed))


def _find_error(raised: Mapping[str, Any]) -> str:
    # Either one flat record, or one per metric that could not be computed.
    records = [raised, *(record for record in raised.values() if isinstance(record, Mapping))]
    return next((str(record["exception_message"]) for record in records if record.get("raised_exception")), "")


def _spell_rule(rule: Mapping[str, Any]) -> str:
    if rule.get("description"):
        return str(rule["description"])
    arguments = {key: value for key, value in rule["kwargs"].items() if value is not None}
    condition = arguments.pop("row_condition", None)
    spelled = ", ".join(f"{key} {_spell(value)}" for key, value in arguments.items())
    return f"{rule['type']}: {spelled}" + (f", where {_spell_condition(condition)}" if condition else "")


def _spell_condition(condition: Mapping[str, Any]) -> str:
    if "conditions" in condition:
        return f" {condition['type']} ".join(_spell_condition(each) for each in condition["conditions"])
    if condition["type"] == "nullity":
        return f"{condition['column']['name']} is {'' if condition['is_null'] else 'not '}null"
    return f"{condition['column']['name']} {condition['operator']} {_spell(condition['parameter'])}"


def _spell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _storable(value: object) -> object:
    # Numbers of numpy are turned into Python's; what is not finite into text, which strict JSON has no number for.
    if isinstance(value, Mapping):
        return {str(key): _storable(item) for key, item in value.items() if key not in _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [_storable(item) for item in value]
    if hasattr(value, "item"):
        return _storable(value.item())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
