"""Every planted fault of a run that is thinned out is caught by its code; the sound run goes without a word."""

import shutil
from pathlib import Path

import pytest
import yaml

from flows.ledger import Ledger, LedgerRequest, make_ledger
from flows.retention import Retained, RetainRequest, retain
from reports.retention_codes import RETENTION_CODES
from tests.builders.long_run import make_long_run, write_log
from tests.builders.many_saves import make_saves, names_in, verify
from tests.faults.faults_in_ledger import FAULTS as IN_LEDGER
from tests.faults.faults_in_retention import FAULTS


@pytest.fixture
def root(tmp_path) -> Path:
    """Ten saves, two of them verified."""
    make_saves(tmp_path / "run", range(10, 101, 10))
    verify(tmp_path / "run", tmp_path / "runs", ["step-90", "step-100"])
    return tmp_path / "run"


def _retain(root: Path, policy: dict, *, apply: bool) -> Retained:
    path = root.parent / "retain.yaml"
    path.write_text(yaml.safe_dump({"keep_last": 3} | policy))
    evals = list(root.parent.glob("result.json"))
    return retain(RetainRequest(root=root, policy=path, apply=apply, evals=evals, runs=root.parent / "runs"))


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_fault_is_caught_by_its_code(fault, root):
    fault.plant(root)
    retained = _retain(root, dict(fault.policy), apply=fault.apply)
    assert fault.code in {found.code for result in retained.report.results for found in result.findings}
    assert retained.report.verdict().green == (RETENTION_CODES[fault.code].severity == "warning")


def test_the_sound_run_is_thinned_out_without_a_word(root):
    retained = _retain(root, {"keep_last": 3}, apply=True)
    assert [found for result in retained.report.results for found in result.findings] == []
    assert retained.report.verdict().green
    assert names_in(root) == {"step-80", "step-90", "step-100"}


@pytest.mark.parametrize("code", sorted(RETENTION_CODES))
def test_each_code_has_a_planted_fault(code):
    assert code in {fault.code for fault in (*FAULTS, *IN_LEDGER)}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A run whose log is whole."""
    base = tmp_path_factory.mktemp("long")
    make_long_run(base)
    write_log(base / "log.jsonl", skip=range(0))
    return base


def _ledger(base: Path) -> Ledger:
    return make_ledger(LedgerRequest(root=base / "run", log=base / "log.jsonl", evals=[base / "evals"], runs=base / "runs"))


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in IN_LEDGER])
def test_a_record_that_disagrees_is_caught_by_its_code(fault, long_run, tmp_path):
    base = Path(shutil.copytree(long_run, tmp_path / "base"))
    history = base / "runs" / "drills.jsonl"
    history.write_text(history.read_text().replace(str(long_run.resolve()), str(base.resolve())))
    fault.plant(base)
    made = _ledger(base)
    assert {found.code for result in made.report.results for found in result.findings} == {fault.code, *fault.also}
    assert made.report.verdict().green == (RETENTION_CODES[fault.code].severity == "warning")


def test_a_run_whose_records_agree_is_lined_up_without_a_word(long_run):
    made = _ledger(long_run)
    assert [found for result in made.report.results for found in result.findings] == []
    assert made.report.verdict().green
