"""The ledger through the real command line, on a synthetic run with spikes, a switch of data and a gap in its log."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from flows.ledger import LedgerRequest, make_ledger
from flows.retention import RetainRequest, retain
from reports.errors import RequestError
from tests.builders.long_run import make_long_run
from tests.builders.many_saves import report_on
from tests.faults.faults_in_ledger import count_by_rank, edit_result, save_with_other_tokens


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    make_long_run(folder)
    return folder


def test_the_ledger_names_the_gap_and_proposes_pins_on_both_sides_of_spikes_and_switch(command_line, base):
    ended = command_line.run("ledger", "run", "--log", "log.jsonl", "--evals", "evals", "--runs", "runs", "--json", cwd=base)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert {(one["code"], one["where"]) for one in told["findings"]} == {
        ("ledger.log-gap", "steps 521 to 539"),
        ("ledger.not-logged", "step 525"),
    }
    assert [(pin["before"], pin["after"]) for pin in told["pins"]] == [(129, 132), (289, 291), (469, 471), (350, 351)]
    rows = {row["step"]: row for row in told["rows"]}
    assert sorted(rows) == list(range(25, 601, 25))
    assert (rows[200]["tokens"], rows[200]["log"]["data"], rows[400]["log"]["data"]) == (200_000, "web-1", "web-2")
    assert rows[600]["evaluations"][0]["results"] == {"arc/acc,none": 0.6}
    assert [event["kind"] for event in rows[575]["events"]] == ["drill"]


def test_mismatches_are_named_beside_the_gap(base, tmp_path):
    planted = Path(shutil.copytree(base, tmp_path / "base"))
    save_with_other_tokens(planted)
    edit_result("400.json", data="web-1")(planted)
    made = make_ledger(LedgerRequest(root=planted / "run", log=planted / "log.jsonl", evals=[planted / "evals"], runs=planted / "runs"))
    assert {(one.code, one.where.replace(f"{planted}/", "")) for result in made.report.results for one in result.findings} == {
        ("ledger.log-gap", "steps 521 to 539"),
        ("ledger.not-logged", "step 525"),
        ("ledger.tokens-differ", "step 100: step-100"),
        ("ledger.data-differs", "step 400: evals/400.json"),
    }
    assert not made.report.verdict().green


def test_of_a_run_whose_saves_count_one_rank_only_the_save_that_missed_a_step_is_named(base, tmp_path):
    planted = Path(shutil.copytree(base, tmp_path / "base"))
    count_by_rank(planted)
    made = make_ledger(LedgerRequest(root=planted / "run", log=planted / "log.jsonl", evals=[planted / "evals"], runs=planted / "runs"))
    found = [(one.code, one.where, one.found) for result in made.report.results for one in result.findings if one.severity == "error"]
    assert found == [("ledger.tokens-differ", "step 100: step-100", "198000")]
    assert {row.step: row.tokens for row in made.rows}[200] == 400_000


def test_a_report_that_cannot_be_read_says_nothing(base, tmp_path):
    planted = Path(shutil.copytree(base, tmp_path / "base"))
    report_on(planted / "runs", "export-1", f"{(planted / 'run').resolve()}/step-75")
    (planted / "runs" / "export-2" / "report.json").mkdir(parents=True)
    (planted / "runs" / "export-3").mkdir()
    (planted / "runs" / "export-3" / "report.json").symlink_to("nowhere")
    made = make_ledger(LedgerRequest(root=planted / "run", runs=planted / "runs"))
    assert made.report.verdict().green


def test_the_table_is_written_beside_the_report(base, tmp_path):
    made = make_ledger(LedgerRequest(root=base / "run", log=base / "log.jsonl", evals=[base / "evals"], runs=tmp_path))
    with (made.paths.html.parent / "ledger.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[7]["saves"] == "step-200"
    assert rows[7]["evaluations"] == "arc/acc 0.2"
    assert made.report.results[0].seconds > 0
    page = made.paths.html.read_text()
    assert '<svg class="chart timeline"' in page
    assert "the switch of data at step 351, from web-1 to web-2" in page


def test_retention_keeps_what_the_ledger_proposes(base, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "drills.jsonl").write_text((base / "runs" / "drills.jsonl").read_text())
    report_on(tmp_path / "runs", "export-1", f"{(base / 'run').resolve()}/step-75")
    request = RetainRequest(root=base / "run", log=base / "log.jsonl", evals=[base / "evals"], runs=tmp_path / "runs")
    kept = {decision.step for decision in retain(request).planned.plan.of("keep")}
    beside = {125, 150, 275, 300, 450, 475, 350, 375}
    assert kept == beside | {75, 200, 400, 550, 575, 600}


def test_terminal_output_names_rows_findings_and_pins(command_line, base):
    shown = command_line.run("ledger", "run", "--log", "log.jsonl", "--evals", "evals", "--runs", "runs", cwd=base).stdout
    assert "step  tokens" in shown
    assert "warning  steps 521 to 539: [ledger.log-gap]" in shown
    assert "pin      steps 129 and 132: beside the loss spike at steps 130 to 131" in shown


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("log.jsonl", '{"step": 1}\n{"loss": 2}\n', "log.jsonl:2"),
        ("log.jsonl", "step 1\n", "is no JSON"),
        ("log.csv", "epoch,loss\n1,2\n", "has no column 'step'"),
        ("trainer_state.json", "{}", "no log_history"),
        ("absent.jsonl", None, "cannot be read"),
    ],
)
def test_a_log_that_is_none_is_refused_with_its_line(base, tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=told):
        make_ledger(LedgerRequest(root=base / "run", log=tmp_path / name, runs=tmp_path / "runs"))


@pytest.mark.parametrize(("content", "told"), [("{", "is no JSON"), ('{"step": "ten", "results": {}}', "no whole number")])
def test_results_that_are_none_are_refused(base, tmp_path, content, told):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(RequestError, match=told):
        make_ledger(LedgerRequest(root=base / "run", evals=[tmp_path / "result.json"], runs=tmp_path / "runs"))
