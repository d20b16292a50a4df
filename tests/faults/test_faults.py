"""Every planted fault is caught by its named code, by no crash, and turns the verdict when its code is an error."""

import pytest

from reports.codes import CODES
from reports.codes_of_sources import CODES_OF_SOURCES
from reports.drill_codes import DRILL_CODES
from reports.gguf_codes import GGUF_CODES
from reports.retention_codes import RETENTION_CODES
from tests.faults.evidence import PAGE, levels_of, row_of
from tests.faults.planted import FAULTS
from tests.faults.planting import judge, plant_and_gather

# tests/integration/test_prove.py and test_approval.py; test_faults_in_ranks.py, _in_checkpoints.py, _in_retention.py and _gguf.py
ELSEWHERE = {
    *("sensitivity.missed", "approval.changed", "approval.rejected", "approval.unanswered"),
    *(*CODES_OF_SOURCES, *DRILL_CODES, *RETENTION_CODES, *GGUF_CODES),
}


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.name, marks=[pytest.mark.slow] if f.logits else []) for f in FAULTS])
def test_fault_is_caught_by_its_code(fault, sound, tmp_path):
    evidence = plant_and_gather(fault, sound[fault.base], tmp_path)
    results = judge(fault, evidence)
    assert [f"{result.check}: {result.reason}" for result in results if result.status == "errored"] == []
    found = {finding.code: result for result in results for finding in result.findings}
    assert fault.code in found
    check = found[fault.code]
    assert check.check == fault.code.split(".")[0]
    if CODES[fault.code].severity == "error":
        assert check.status == "failed"
    if fault.review is None:
        assert row_of(fault, levels_of(fault, evidence)) in PAGE.read_text(encoding="utf-8").splitlines(), "run: make faults"


def test_fault_names_are_unique():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("code", sorted(CODES.keys() - ELSEWHERE))
def test_each_code_has_a_planted_fault(code):
    assert code in {fault.code for fault in FAULTS}
