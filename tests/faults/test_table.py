"""docs/faults.md is what the planted faults are."""

from tests.faults.table import PAGE, render


def test_the_page_of_faults_is_current():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m tests.faults.table"
