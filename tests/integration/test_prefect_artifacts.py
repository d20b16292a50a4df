"""What a run shows in Prefect, read back through Prefect's own client."""

import base64
import json
import math
import threading
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.context import get_run_context

from reports.errors import RequestError
from reports.model import CheckResult, Finding, PastRun
from reports.write import write_report
from tasks.artifacts import (
    MAX_FINDINGS,
    ProgressArtifact,
    artifact_key,
    show_check,
    show_findings,
    show_refusal,
    show_report,
    show_trends,
)
from tests.builders.reports import GREEN, HOSTILE, LONG, RED, SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def artifacts_of(body):
    """Run `body` in a flow; return the artifacts of that run by key."""

    @flow
    def show():
        body()
        return get_run_context().flow_run.id

    run = show()
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run])))
    return {artifact.key: artifact for artifact in found}


def test_each_check_has_its_summary():
    shown = artifacts_of(lambda: [show_check(result) for result in RED.results])
    assert set(shown) == {f"check-{result.check}" for result in RED.results}
    finite = shown["check-finite"]
    assert finite.type == "markdown"
    assert finite.description == "finite: failed"
    assert finite.data.startswith("### finite: ❌ failed")
    assert "worst NaN" in finite.data


def test_the_findings_are_one_table_with_errors_first():
    (table,) = artifacts_of(lambda: show_findings(RED.results)).values()
    rows = json.loads(table.data)
    assert (table.key, table.type, table.description) == ("findings", "table", "12 findings")
    assert [row["severity"] for row in rows] == ["error"] * 11 + ["warning"]
    assert rows[0]["where"] == "`model.layers.0.mlp.down_proj.weight`"
    assert rows[0]["what to do"] == "`Export again from a complete checkpoint.`"


def test_a_drills_numbers_are_pictures_from_the_second_run_on():
    past = PastRun("drill-1", "2026-01-01T00:00:00+00:00", "D2", 3, True, 3.0, 60.0, 1000)
    runs = (past, replace(past, run_id="drill-2", green=False, rto_seconds=5.0))
    assert artifacts_of(lambda: show_trends(replace(GREEN, history=runs[:1]))) == {}
    shown = artifacts_of(lambda: show_trends(replace(GREEN, history=runs)))
    assert set(shown) == {"trend-recovery-time-s", "trend-work-lost-s", "trend-bytes-of-the-newest-save"}
    picture = shown["trend-recovery-time-s"]
    kind, _, text = picture.data.partition(";base64,")
    assert (picture.type, kind) == ("image", "data:image/svg+xml")
    assert ElementTree.fromstring(base64.b64decode(text)).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_refusal_says_what_where_and_what_to_do():
    (shown,) = artifacts_of(lambda: show_refusal(RequestError("does not exist", where="/a/b", remedy="Check the path."))).values()
    assert shown.key == "report"
    assert [part in shown.data for part in ("does not exist", "`/a/b`", "Check the path.")] == [True] * 3


def test_a_finding_about_nan_keeps_the_word():
    results = (CheckResult("finite", "failed", (Finding("finite.nan", "error", "w", "0.5", str(math.nan), "Fix."),), 1),)
    (table,) = artifacts_of(lambda: show_findings(results)).values()
    assert json.loads(table.data)[0]["found"] == "`nan`"


def test_too_many_findings_are_capped_and_counted():
    findings = tuple(Finding("a.b", "error", f"w{n}", "", "", "Fix.") for n in range(MAX_FINDINGS + 41))
    (table,) = artifacts_of(lambda: show_findings((CheckResult("a", "failed", findings, 1),))).values()
    assert len(json.loads(table.data)) == MAX_FINDINGS
    assert table.description == "241 findings, the first 200 shown; all are in report.json"


def test_hostile_names_stay_in_their_code_spans_and_long_ones_are_shortened():
    shown = artifacts_of(lambda: [show_findings(HOSTILE.results), *(show_check(result) for result in HOSTILE.results)])
    rows = json.loads(shown["findings"].data)
    assert rows[0]["where"] == f"`{SCRIPT}`"
    assert rows[2]["where"] == "``` a`b``c|d ```"
    assert r"\x1b[31m\ud800" in rows[3]["where"]
    assert LONG not in json.dumps(rows)
    assert "check-check-script-alert-1-script" in shown


def test_the_report_artifact_says_the_verdict_and_where_the_page_is(tmp_path):
    paths = write_report(GREEN, tmp_path)
    (shown,) = artifacts_of(lambda: show_report(GREEN, paths)).values()
    assert shown.description == GREEN.verdict().line
    assert f"`{paths.html}`" in shown.data
    assert "## ✅ green" in shown.data
    (red,) = artifacts_of(lambda: show_report(GREEN, paths, frozenset({"tokenizer"}))).values()
    assert red.description.startswith("not published")


def test_a_summary_shown_by_a_task_belongs_to_the_run_too():
    @task
    def check():
        show_check(GREEN.results[0])

    (shown,) = artifacts_of(check).values()
    assert shown.task_run_id is not None


def test_bytes_written_end_at_a_hundred_percent_from_any_thread():
    def write():
        progress = ProgressArtifact()
        progress.start(4000)
        threads = [threading.Thread(target=lambda: [progress.advance(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        progress.stop()

    (shown,) = artifacts_of(write).values()
    assert (shown.key, shown.type, float(shown.data)) == ("written", "progress", 100.0)


@pytest.mark.parametrize(
    ("name", "key"), [("check-v1.2", "check-v1-2"), ("Bad_Key", "bad-key"), ("模型", "unnamed"), ("a" * 300, "a" * 100)]
)
def test_any_name_becomes_a_key_that_prefect_takes(name, key):
    assert artifact_key(name) == key
    shown = artifacts_of(lambda: show_check(replace(GREEN.results[0], check=name)))
    assert set(shown) == {artifact_key(f"check-{name}")}
