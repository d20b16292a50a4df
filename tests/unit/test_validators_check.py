"""The frame around a check: needs, statuses, crashes, and how findings are folded."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from reports.codes import CODES, finding
from reports.drill_codes import DRILL_CODES
from reports.retention_codes import RETENTION_CODES
from validators import review
from validators.approval import APPROVAL
from validators.check import MAX_FINDINGS_PER_CODE, NEEDS, Check, Outcome, attempt, fold_findings, run
from validators.checks import CHECKS, CHECKS_BEFORE_WRITING, NAMED
from validators.drills.checks import DRILL_CHECKS
from validators.expectation import Evidence
from validators.refusal import SOURCE
from validators.release import Release

EMPTY = Evidence(Release(None, ()))
MISSING = finding("inventory.missing", "a")
MIXED = finding("shapes.mixed-source", "a")


def still():
    """Return a clock that stands still."""
    return 0.0


def saying(*findings, examined=1):
    """Return a check without needs that says `findings`."""
    return Check("saying", (), lambda evidence: Outcome(findings, examined))


def test_check_without_findings_passes_and_tells_its_seconds():
    ticks = count()
    result = run(saying(), EMPTY, lambda: float(next(ticks)))
    assert (result.status, result.examined, result.seconds) == ("passed", 1, 1.0)


def test_error_fails_the_check_and_a_warning_does_not():
    assert run(saying(MISSING), EMPTY, still).status == "failed"
    assert run(saying(MIXED), EMPTY, still).status == "passed"


def test_crash_becomes_errored_and_names_kind_place_and_words():
    def crash(evidence):
        raise ZeroDivisionError("by nought")

    result = run(Check("crashing", (), crash), EMPTY, still)
    assert result.status == "errored"
    assert result.reason.startswith("ZeroDivisionError at test_validators_check.py:")
    assert result.reason.endswith("by nought")


def test_long_words_of_a_crash_are_cut():
    def crash(evidence):
        raise ValueError("x" * 5000)

    assert len(run(Check("crashing", (), crash), EMPTY, still).reason) < 400


def test_interrupt_is_not_turned_into_a_result():
    def interrupt(evidence):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Check("interrupted", (), interrupt), EMPTY, still)


@pytest.mark.parametrize("need", sorted(set(NEEDS) - {"headers"}))
def test_unmet_need_skips_with_the_given_reason_or_its_own(need):
    check = Check("needy", (need,), lambda evidence: Outcome(examined=1))
    assert run(check, EMPTY, still).reason == NEEDS[need].otherwise
    told = run(check, replace(EMPTY, reasons={need: "told so"}), still)
    assert (told.status, told.reason) == ("skipped", "told so")


def test_tokenizer_need_looks_into_the_assets(tmp_path):
    evidence = Evidence(Release(None, (), assets=tmp_path))
    assert not NEEDS["tokenizer"].is_met(evidence)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert NEEDS["tokenizer"].is_met(evidence)


def test_same_finding_twice_is_one_with_a_count():
    assert fold_findings([MISSING, MISSING, MISSING]) == (replace(MISSING, count=3),)


def test_findings_beyond_the_cap_are_counted_in_the_last():
    many = [finding("inventory.missing", f"t{i:03}") for i in range(MAX_FINDINGS_PER_CODE + 7)]
    folded = fold_findings(many)
    assert len(folded) == MAX_FINDINGS_PER_CODE
    assert [f.count for f in folded] == [1] * (MAX_FINDINGS_PER_CODE - 1) + [8]


def test_errors_come_before_warnings():
    assert fold_findings([MIXED, MISSING]) == (MISSING, MIXED)


def test_attempt_gives_the_value_or_the_exception():
    assert attempt(lambda: 3) == 3
    assert isinstance(attempt(lambda: {}["absent"]), KeyError)


def test_a_checks_name_is_its_files_name_and_its_codes_begin_with_it():
    names = [check.name for check in NAMED]
    assert [Path(check.examine.__code__.co_filename).stem for check in NAMED] == names
    of_a_whole_run = {"sensitivity", review.NAME, APPROVAL, SOURCE}  # made by flows: about no evidence of a release
    assert {code.split(".")[0] for code in CODES.keys() - DRILL_CODES.keys() - RETENTION_CODES.keys()} == {*names, *of_a_whole_run}
    drilled = [check.name for check in DRILL_CHECKS]
    assert [Path(check.examine.__code__.co_filename).stem for check in DRILL_CHECKS] == drilled
    assert {code.split(".")[0] for code in DRILL_CODES} <= set(drilled)


def test_checks_before_writing_need_no_bytes():
    assert {need for check in CHECKS_BEFORE_WRITING for need in check.needs} & {"bytes", "values", "logits"} == set()
    assert set(CHECKS_BEFORE_WRITING) <= set(CHECKS)
