"""The Markdown summary, read back by a Markdown parser that is not ours (markdown-it)."""

import math
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from reports.markdown import code_span, escape_markdown, render_check, render_markdown, shorten
from reports.model import CheckResult
from tests.builders.reports import GREEN, HOSTILE, RED, SCRIPT, huge

PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")
LIVE = {"html_inline", "html_block", "link_open", "image", "fence", "code_block", "hr", "blockquote_open"}

NASTY = [
    SCRIPT,
    "[x](http://evil.example)",
    "![x](http://evil.example/x.png)",
    "a|b",
    "`tick`` and ```more",
    "*bold* _it_ __x__ ~~gone~~",
    "# heading",
    "- list",
    "1. list",
    "+ list",
    "---",
    "> quote",
    "<http://evil.example>",
    "<!-- hidden",
    "&lt;b&gt; &amp;",
    "back\\slash \\| bar",
    "line\nbreak\n\n# new",
    "===",
    " leading",
    "trailing \\",
    "`",
    "``",
]


def tokens(markdown):
    """All tokens of a text, inline ones too."""
    return [t for block in PARSER.parse(markdown) for t in (block, *(block.children or ()))]


def cells(markdown):
    """The text of each table cell, by row."""
    rows, parsed = [], PARSER.parse(markdown)
    for here, token in enumerate(parsed):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("td_open", "th_open"):
            rows[-1].append("".join(c.content for c in parsed[here + 1].children))
    return rows


@pytest.mark.parametrize("text", NASTY)
def test_escaped_text_reads_back_as_itself_and_as_nothing_else(text):
    spelled = text.replace("\n", r"\x0a")
    parsed = PARSER.parse(escape_markdown(text))
    assert [t.type for t in parsed] == ["paragraph_open", "inline", "paragraph_close"]
    assert "".join(t.content for t in parsed[1].children) == spelled.strip()
    assert not LIVE & {t.type for t in parsed[1].children}


@pytest.mark.parametrize("text", NASTY)
def test_a_code_span_in_a_table_reads_back_as_itself(text):
    spelled = text.replace("\n", r"\x0a")
    table = f"| a | b |\n|---|---|\n| {code_span(text, in_table=True)} | end |"
    assert cells(table)[1] == [spelled, "end"]


@pytest.mark.parametrize("text", NASTY)
def test_escaped_text_stays_in_its_table_cell(text):
    table = f"| a | b |\n|---|---|\n| {escape_markdown(text)} | end |"
    assert cells(table)[1] == [text.replace("\n", r"\x0a").strip(), "end"]


def test_the_first_lines_are_the_verdict_and_the_mapping():
    head = render_markdown(GREEN).split("\n\n")
    assert head[0] == "## ✅ green · /releases/harbour-7b/v1.4"
    assert head[1] == "published, 1 check skipped: tokenizer (no tokenizer in --assets)"
    assert head[2] == "mapping proven by: recorded"
    assert render_markdown(RED).startswith("## ❌ red")
    assert render_markdown(GREEN, frozenset({"tokenizer"})).startswith("## ❌ red")


def test_every_check_is_a_row_and_every_finding_its_remedy():
    text = render_markdown(RED)
    assert {row[0] for row in cells(text)} >= {r.check for r in RED.results}
    for finding in (f for r in RED.results for f in r.findings):
        assert finding.where in text
        assert finding.remedy in text


def test_errors_come_before_warnings_whatever_the_checks_order():
    report = replace(GREEN, results=(GREEN.results[6], *RED.results[:1]))
    text = render_markdown(report)
    assert text.index("`inventory.missing`") < text.index("`statistics.outlier`")


def test_nothing_out_of_a_checkpoint_becomes_markup():
    parsed = tokens(render_markdown(HOSTILE))
    assert not LIVE & {t.type for t in parsed}
    assert any(t.type == "code_inline" and t.content == SCRIPT for t in parsed)


def test_the_summary_stays_short_whatever_the_report_holds():
    assert len(render_markdown(huge())) < 4000
    assert len(render_markdown(HOSTILE)) < 10_000


def test_a_long_name_keeps_both_ends():
    assert shorten("a" * 100 + "z" * 100, 21) == "a" * 10 + "…" + "z" * 10
    assert shorten("short") == "short"


def test_one_check_is_a_heading_its_numbers_and_its_findings():
    text = render_check(CheckResult("finite", "failed", RED.results[1].findings, 291, {"worst": math.nan}, {"worst": 0.5}, 2.7))
    assert text.startswith("### finite: ❌ failed\n\n291 examined in 2.70 s.\n")
    assert "- worst NaN (limit 0.5)" in text
    assert "`finite.nan`" in text
    assert "- reason" not in render_check(CheckResult("tokenizer", "skipped", reason="no tokenizer"))
