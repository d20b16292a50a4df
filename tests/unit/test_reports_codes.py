"""The table of codes: well-formed, complete, and read by `finding`."""

import re

import pytest

from reports.codes import CODES, finding


def test_codes_have_the_form_of_check_and_what():
    assert [code for code in CODES if not re.fullmatch(r"[a-z_]+\.[a-z0-9-]+", code)] == []


@pytest.mark.parametrize("code", sorted(CODES))
def test_code_says_what_it_means_and_what_to_do(code):
    row = CODES[code]
    assert row.meaning
    assert not row.meaning.endswith(".")
    assert row.remedy.endswith(".")


def test_finding_takes_severity_and_remedy_from_its_code():
    found = finding("values.flushed", "w", expected="few", found="many")
    assert (found.severity, found.remedy) == (CODES["values.flushed"].severity, CODES["values.flushed"].remedy)
    with pytest.raises(KeyError):
        finding("values.unheard-of", "w")
