"""The report's files: all four, each whole or not at all."""

import json

import pytest

import reports.write
from reports.model import report_from_json, report_to_json
from reports.write import replace_text, write_report
from tests.builders.reports import GREEN, HOSTILE, RED


@pytest.mark.parametrize("report", [GREEN, RED, HOSTILE])
def test_all_four_files_are_written(tmp_path, report):
    paths = write_report(report, tmp_path / "runs" / "one")
    assert sorted(p.name for p in paths.json.parent.iterdir()) == ["report.html", "report.json", "report.md", "report.xml"]
    assert paths.html.read_text("utf-8").startswith("<!doctype html>")
    assert paths.markdown.read_text("utf-8").startswith("## ")
    assert paths.junit.read_text("utf-8").startswith('<?xml version="1.0" encoding="UTF-8"?>')
    assert paths.json.stat().st_mode & 0o777 == 0o644


def test_the_stored_json_is_the_whole_report(tmp_path):
    stored = write_report(RED, tmp_path).json.read_text("utf-8")
    assert report_to_json(report_from_json(stored)) == stored
    assert json.loads(stored)["logits"][0]["metrics"]["mean_kl"] == "NaN"
    assert report_from_json(write_report(GREEN, tmp_path).json.read_text("utf-8")) == GREEN


def test_a_name_that_is_not_utf8_is_spelled_and_the_report_can_be_read_back(tmp_path):
    stored = write_report(HOSTILE, tmp_path).json.read_text("utf-8")
    places = [finding.where for result in report_from_json(stored).results for finding in result.findings]
    assert "]]>\x00\x1b[31m\\ud800" in places


def test_a_rendering_that_fails_leaves_the_json_and_the_page_before(tmp_path, monkeypatch):
    before = write_report(GREEN, tmp_path)

    def fail(*_):
        raise RuntimeError("no page today")

    monkeypatch.setattr(reports.write, "render_html", fail)
    with pytest.raises(RuntimeError, match="no page today"):
        write_report(RED, tmp_path)
    assert report_from_json(before.json.read_text("utf-8")).subject == RED.subject
    assert GREEN.subject in before.html.read_text("utf-8")


def test_a_write_that_fails_leaves_nothing_of_itself(tmp_path):
    taken = tmp_path / "report.md"
    taken.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_text(taken, "text")
    assert list(tmp_path.iterdir()) == [taken]


def test_a_reader_who_holds_the_old_file_keeps_it_whole(tmp_path):
    path = replace_text(tmp_path / "report.md", "old")
    with path.open() as held:
        replace_text(path, "new")
        assert held.read() == "old"
    assert path.read_text() == "new"
