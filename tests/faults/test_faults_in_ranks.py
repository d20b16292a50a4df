"""Every planted fault of Megatron's ranks is caught by its code, in the report of a whole export that has no recorded logits."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flows.export import NotPublishedError, run_export
from flows.gate import run_gate
from flows.requests import ExportRequest, GateRequest
from flows.run import PlainRunner, Silent
from reports.codes import CODES
from reports.codes_of_sources import CODES_OF_SOURCES
from reports.errors import ReleaseError, RequestError
from reports.model import Report, report_from_json
from tests.builders.megatron import Grid
from tests.builders.megatron_runs import RUN, prepare
from tests.faults.faults_in_ranks import CLASSICS, DENSE, EVEN, EXPERTS, FAULTS, TIED

pytestmark = pytest.mark.slow


def _export(folder: Path) -> Report:
    request = ExportRequest(
        source=folder / "ckpt",
        to=folder / "out",
        assets=folder / "hf",
        dtype="fp32",
        fsync=False,
        skip=["tokenizer=none here", "duplicates=small numbers", "outliers=small numbers", "rows=small numbers"],
        runs=folder / "runs",
    )
    return run_export(request, PlainRunner(), Silent()).report


def _stored_report(folder: Path) -> Report:
    (path,) = (folder / "runs").glob("*/report.json")
    return report_from_json(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_fault_is_caught_by_its_code(fault, tmp_path, monkeypatch):
    prepare(tmp_path, fault.model, replace(fault.grid, args=RUN), golden=False)
    if fault.patch:
        fault.patch(monkeypatch)
    if fault.damage:
        fault.damage(tmp_path)
    with pytest.raises(ReleaseError if fault.by == "the source" else NotPublishedError):
        _export(tmp_path)
    assert not (tmp_path / "out").exists()
    report = _stored_report(tmp_path)
    (found,) = [finding for result in report.results for finding in result.findings if finding.code == fault.code]
    assert found.where in (fault.where, str(tmp_path / fault.where))
    assert [text for text in fault.said if text not in found.found] == []
    assert fault.code in report.verdict().line
    if fault.by != "the source":
        followed = next(result for result in report.results if result.check == "values").status
        assert followed == ("passed" if fault.by == "a rule" else "failed")


def test_the_classic_mistakes_of_converters_are_planted():
    planted = {fault.name: fault.code for fault in FAULTS}
    assert {planted[name] for name in CLASSICS.values()} <= CODES.keys()


@pytest.mark.parametrize("code", sorted(CODES_OF_SOURCES))
def test_each_code_of_a_source_has_a_planted_fault(code):
    assert code in {fault.code for fault in FAULTS}


def test_a_gate_that_the_source_contradicts_leaves_a_report_too(tmp_path):
    prepare(tmp_path, DENSE, Grid(tp=2, args=RUN), golden=False)
    _export(tmp_path)
    config = tmp_path / "out/config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    shutil.rmtree(tmp_path / "runs")
    asked = {"release": tmp_path / "out", "against": tmp_path / "ckpt", "runs": tmp_path / "runs"}
    with pytest.raises(RequestError, match="eps is 1e-06"):
        run_gate(GateRequest.model_validate(asked), PlainRunner())
    assert "source (source.config-contradicts)" in _stored_report(tmp_path).verdict().line


@pytest.mark.parametrize("model", [DENSE, EVEN, EXPERTS, TIED], ids=["dense", "as many heads as groups", "experts", "tied"])
def test_a_right_mapping_is_proven_without_recorded_logits(model, tmp_path):
    prepare(tmp_path, model, Grid(pp=2, args=RUN), golden=False)
    report = _export(tmp_path)
    assert [(w.name, w.heard) for w in report.witnesses if "mapping" in w.proves] == [
        ("recorded", False),
        ("framework", False),
        ("native forward", True),
    ]
