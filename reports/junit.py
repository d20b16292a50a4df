"""The report as JUnit XML: a test case per check, and one for the verdict. A CI job that reads it is red exactly when the verdict is.

A verdict can be red though no check failed (a required check was skipped, a check examined nothing), hence its own case.
Source: junitparser 5 writes the Jenkins dialect (https://github.com/testmoapp/junitxml). XML 1.0 cannot hold control characters:
they are spelled.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from reports.model import CheckResult, Finding, Report, Status
from reports.spell import spell_limits, spell_seconds, spell_unseen

MAX_FINDINGS = 100  # of one check
VERDICT = "verdict"


def render_junit(report: Report, required: frozenset[str] = frozenset()) -> str:
    """Return the report as JUnit XML.

    Args:
        report: any report.
        required: names of checks the policy does not let be skipped.

    Returns:
        XML text with its declaration, UTF-8.
    """
    verdict = report.verdict(required)
    suite = TestSuite(f"shardwright.{spell_unseen(report.kind)}")
    suite.timestamp = spell_unseen(report.started)
    for name, value in _properties(report):
        suite.add_property(spell_unseen(name), spell_unseen(value))
    suite.add_testcases([_case(report.kind, result) for result in report.results])
    case = TestCase(VERDICT, _classname(report.kind), 0.0)
    if not verdict.green:
        case.result = [Failure(spell_unseen(verdict.line), "not green")]
    case.system_out = spell_unseen(verdict.line)
    suite.add_testcase(case)
    document = JUnitXml("shardwright")
    document.add_testsuite(suite)
    document.update_statistics()
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{document.tostring().decode("utf-8")}\n'


def _properties(report: Report) -> list[tuple[str, str]]:
    facts = {
        "run_id": report.run_id,
        "subject": report.subject,
        "source": report.source,
        "plan_digest": report.plan_digest,
        **({"mapping": report.mapping_line()} if report.has_mapping else {}),
        "schema": report.schema,
    }
    return [*facts.items(), *((f"environment.{name}", value) for name, value in sorted(report.environment.items()))]


def _classname(kind: str) -> str:
    return f"shardwright.{spell_unseen(kind)}"


def _case(kind: str, result: CheckResult) -> TestCase:
    case = TestCase(spell_unseen(result.check), _classname(kind), result.seconds)
    outcome = _OUTCOMES[result.status](result)
    if outcome is not None:
        case.result = [outcome]
    others = [f for f in result.findings if f.severity != "error"]
    measured = [f"{name}: {value or 'not measured'}" + (f" (limit {limit})" if limit else "") for name, value, limit in _measures(result)]
    case.system_out = "\n".join([f"examined {result.examined} in {spell_seconds(result.seconds)}", *measured, *_lines(others)])
    return case


def _measures(result: CheckResult) -> list[tuple[str, str, str]]:
    return spell_limits(result.measured, result.limits)


def _failure(result: CheckResult) -> Failure:
    errors = [f for f in result.findings if f.severity == "error"]
    codes = ", ".join(dict.fromkeys(f.code for f in errors)) or "failed"
    failure = Failure(spell_unseen(codes), spell_unseen(errors[0].code if errors else codes))
    failure.text = "\n".join(_lines(errors))
    return failure


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for f in findings[:MAX_FINDINGS]:
        alike = f" (and {f.count - 1} alike)" if f.count > 1 else ""
        line = f"{f.severity} {f.code} at {f.where}{alike}: expected {f.expected or 'nothing'}, found {f.found or 'nothing'}. "
        line += f"Waived: {f.waived}" if f.waived else f.remedy
        lines.append(spell_unseen(line))
    more = len(findings) - MAX_FINDINGS
    return [*lines, f"{more} more in report.json"] if more > 0 else lines


_OUTCOMES: MappingProxyType[Status, Callable[[CheckResult], Failure | Error | Skipped | None]] = MappingProxyType(
    {
        "passed": lambda result: None,
        "failed": _failure,
        "errored": lambda result: Error(spell_unseen(result.reason), "could not run"),
        "skipped": lambda result: Skipped(spell_unseen(result.reason)),
    }
)
