"""A waived finding is shown for what it is in every rendering: an error that an owner lets pass until a day."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

from jsonschema import validate

from reports.html import render_html
from reports.junit import render_junit
from reports.markdown import render_markdown
from reports.model import Waiver, report_schema, report_to_json
from reports.write import write_report
from tests.builders.reports import GREEN, HOSTILE, RED, SCRIPT

BECAUSE = "Ada until 2026-12-31: the mirror recompresses (policy.yaml:4)"
USED = Waiver("config.field", "*", "Ada", "the mirror recompresses", "2026-12-31", "policy.yaml:4", 1)
UNUSED = replace(USED, subject="tokenizer", place="policy.yaml:9", findings=0)
_CONFIG = next(result for result in RED.results if result.check == "config")
WAIVED = replace(
    GREEN,
    results=(replace(_CONFIG, status="passed", findings=(replace(_CONFIG.findings[0], severity="waived", waived=BECAUSE),)),),
    waivers=(USED, UNUSED),
)


def test_the_page_has_a_part_for_what_is_waived_and_a_table_of_waivers():
    page = render_html(WAIVED)
    assert "Waived by the policy" in page
    assert f"waived: {BECAUSE}" in page
    assert "Waivers of the policy" in page
    assert page.count("policy.yaml:9") == 1
    assert "<h2>Errors</h2>" not in page


def test_the_summary_marks_it_and_names_the_owner():
    text = render_markdown(WAIVED)
    assert "| ⊘ waived | `config.field` |" in text
    assert "- waived `config.field` at `*` by Ada until 2026-12-31" in text
    assert "policy.yaml:9" not in text


def test_junit_passes_the_case_and_says_why():
    suite = ET.fromstring(render_junit(WAIVED).encode())
    case = next(case for case in suite.iter("testcase") if case.get("name") == "config")
    assert case.find("failure") is None
    assert f"Waived: {BECAUSE}" in (case.findtext("system-out") or "")


def test_a_report_without_waivers_says_nothing_of_them():
    for text in (render_html(GREEN).split("</style>")[1], render_markdown(GREEN), render_junit(GREEN)):
        assert "aived" not in text


def test_the_schema_knows_waivers():
    validate(json.loads(report_to_json(WAIVED)), report_schema())


def test_what_an_owner_writes_is_escaped():
    hostile = replace(HOSTILE, waivers=(replace(USED, subject=SCRIPT, owner=SCRIPT, reason=SCRIPT, where=SCRIPT, place=SCRIPT),))
    for text in (render_html(hostile), render_markdown(hostile)):
        assert not [line for line in text.splitlines() if SCRIPT in line and "`" not in line]
    ET.fromstring(render_junit(hostile).encode())


def test_attachments_are_written_beside_the_report(tmp_path):
    report = replace(GREEN, results=(replace(GREEN.results[0], attachments={"great_expectations.json": '{"success": true}'}),))
    write_report(report, tmp_path)
    assert (tmp_path / "great_expectations.json").read_text() == '{"success": true}'
