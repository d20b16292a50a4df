"""What the one line about the mapping may claim."""

from dataclasses import replace

import pytest

from reports.model import CheckResult, Witness
from tests.builders.reports import GREEN

HEARD = (Witness("recorded", True, ("mapping",)), Witness("second path", True, ("bytes",)))


def with_result(check, status):
    """A report that heard its witnesses, with one result."""
    return replace(GREEN, witnesses=HEARD, results=(CheckResult(check, status),))


def test_only_heard_witnesses_of_the_mapping_are_named():
    assert with_result("logits", "passed").mapping_line() == "mapping proven by: recorded"


@pytest.mark.parametrize("check", ["logits", "values"])
@pytest.mark.parametrize("status", ["failed", "errored"])
def test_a_witness_that_contradicts_the_release_proves_nothing(check, status):
    assert with_result(check, status).mapping_line() == "mapping not proven"


def test_another_checks_failure_leaves_the_proof():
    assert with_result("tokenizer", "failed").mapping_line() == "mapping proven by: recorded"
