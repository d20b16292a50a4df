"""The page: order, escaping, caps, and what may never hide."""

import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from reports.encoded import sum_encodings
from reports.html import MAX_FINDINGS, MAX_ROLES, MAX_TENSORS, group_findings, pick_roles, render_html
from reports.model import CheckResult, EncodedWeight, Finding
from tests.builders.reports import GREEN, HOSTILE, LONG, RED, SCRIPT, huge, layers, statistics


class Page(HTMLParser):
    """The tags, attributes and visible text of a page, by the standard library's parser."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.pieces = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.pieces.append(" " if tag in ("td", "th", "div", "p") else "")
        self.attributes += attrs

    def handle_data(self, data):
        self.pieces.append(data)

    @property
    def text(self):
        return re.sub(r"[ \n]+", " ", "".join(self.pieces))


def headings(text):
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_a_red_page_reads_in_the_order_of_a_reader_in_a_hurry():
    page = render_html(RED)
    assert headings(page) == [
        "Errors",
        "Warnings",
        "Checks",
        "Witnesses",
        "Logits",
        "Fields changed in copied files",
        "Left out, and why",
        "Where time and bytes went",
        "Values by layer",
        "Tensors",
        "Environment",
    ]
    assert page.index("✗ red") < page.index("mapping not proven") < page.index("<h2>")


def test_the_verdict_line_is_the_models_own_and_not_told_by_colour_alone():
    green, red = Page(render_html(GREEN)).text, Page(render_html(RED)).text
    assert f"✓ green · {GREEN.verdict().line}" in green
    assert f"✗ red · {RED.verdict().line}" in red
    assert "mapping proven by: recorded" in green


def test_a_check_the_policy_requires_turns_the_page_red():
    assert "✗ red" in render_html(GREEN, frozenset({"tokenizer"}))


def test_every_finding_stands_on_the_page_with_its_remedy():
    text = Page(render_html(RED)).text
    for finding in (f for r in RED.results for f in r.findings):
        for part in (finding.code, finding.where, finding.expected, finding.found, finding.remedy):
            assert part in text


def test_a_skipped_check_and_an_unheard_witness_say_why():
    text = Page(render_html(GREEN)).text
    assert "⊘ skipped" in text
    assert "no tokenizer in --assets" in text
    assert "two copies need 28.9 GiB, --witness-memory allows 8 GiB" in text


def test_numbers_that_are_not_finite_stay_visible():
    text = Page(render_html(RED)).text
    assert "mean_kl NaN 2.4" in text
    assert "p95_kl Infinity 8" in text
    assert re.search(r"self_attn\.q_proj\.weight BF16 4096\u00d74096 32\.0 MiB NaN NaN", text)


def test_nothing_out_of_a_checkpoint_becomes_markup():
    page = render_html(HOSTILE)
    parsed = Page(page)
    known = set(Page(render_html(RED)).tags)
    assert set(parsed.tags) <= known
    assert "script" not in known
    assert "img" not in known
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert SCRIPT in parsed.text
    assert "{{ 7*7 }}" in parsed.text
    assert r"]]>\x00\x1b[31m\ud800" in parsed.text
    assert "\u202e" not in page


def test_the_page_fetches_nothing_and_forbids_it_too():
    page = render_html(GREEN)
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in page
    assert not re.search(r"url\(|@import|https?://", page)


def test_a_long_name_is_shown_whole():
    assert LONG in Page(render_html(HOSTILE)).text


def test_a_hundred_thousand_tensors_make_a_small_page_quickly():
    report = huge()
    began = time.perf_counter()
    page = render_html(report)
    seconds = time.perf_counter() - began
    assert len(report.tensors) > 100_000
    assert len(page.encode()) < 3_000_000
    assert seconds < 10  # 0.5 s on an idle core
    assert f"{len(report.tensors) - MAX_TENSORS:,} more".replace(",", "\u202f") in Page(page).text


def test_findings_beyond_the_cap_are_counted():
    findings = tuple(Finding("inventory.missing", "error", f"w{n}", "", "", "Export again.") for n in range(MAX_FINDINGS + 7))
    report = replace(GREEN, results=(CheckResult("inventory", "failed", findings, 9),))
    assert "7 more of this code in report.json." in Page(render_html(report)).text


def test_one_code_with_two_remedies_is_two_groups():
    results = (CheckResult("a", "failed", tuple(Finding("a.b", "error", "w", "", "", remedy) for remedy in "xyx"), 3),)
    groups = group_findings(replace(GREEN, results=results), "error")
    assert [(g.remedy, g.count) for g in groups.rows] == [("x", 2), ("y", 1)]


def test_tensors_that_are_not_finite_come_first():
    page = render_html(replace(GREEN, tensors=(*layers(40), replace(statistics("last.weight", 1.0), rms=math.nan, nonfinite=2))))
    table = page[page.index("<h2>Tensors") :]
    assert table.index("last.weight") < table.index("model.embed_tokens.weight")


def test_too_many_roles_keep_the_broken_one():
    tensors = [statistics(f"layers.{layer}.role{role}.w", 1.0) for role in range(MAX_ROLES + 5) for layer in range(2)]
    tensors[-1] = replace(tensors[-1], rms=math.nan, nonfinite=1)
    roles = pick_roles(tensors)
    assert len(roles.rows) == MAX_ROLES
    assert roles.more == 5
    assert roles.rows[-1].nonfinite == 1


@pytest.mark.parametrize(
    "report",
    [
        replace(GREEN, results=()),
        replace(GREEN, results=(), witnesses=(), environment={}, tensors=(), phases=(), logits=(), changes=(), omissions=(), notes=()),
        replace(GREEN, kind="drill", action="restored", plan_digest=""),
    ],
)
def test_a_report_with_little_in_it_still_renders(report):
    assert "<h2>Checks</h2>" in render_html(report)


def test_quantized_weights_show_sizes_before_and_after_the_worst_first_and_a_sorted_plot():
    weights = [EncodedWeight(f"layers.{i}.up", "int4" if i else "fp8", 100, 800, 0.001 * (i + 1)) for i in range(30)]
    weights += [EncodedWeight("not.compared", "fp8", 100, 200, math.nan), EncodedWeight(SCRIPT, "int4", 100, 800, 0.5)]
    text = render_html(replace(GREEN, encoded=tuple(weights)))
    page = Page(text)
    assert "Quantized weights" in headings(text)
    assert "relative error of quantized weights, sorted, 31, from 0.5 to 0.001" in page.text
    assert text.index("layers.29.up") < text.index("layers.28.up") < text.index("22 more weights")
    assert [size.name for size in sum_encodings(weights)] == ["fp8", "int4"]
    assert [(size.weights, size.nbytes, size.source_nbytes, size.worst) for size in sum_encodings(weights)] == [
        (2, 200, 1000, 0.001),
        (30, 3000, 24000, 0.5),
    ]
    assert "script" not in page.tags


def test_a_release_without_quantized_weights_says_nothing_of_them():
    assert "Quantized weights" not in headings(render_html(GREEN))


@pytest.mark.parametrize(("finished", "told"), [("12:00:00", "less than 1 s"), ("12:00:07", "7 s"), ("12:03:04", "3 min 04 s")])
def test_times_to_the_second_read_as_such(finished, told):
    report = replace(GREEN, started="2026-11-30T12:00:00+00:00", finished=f"2026-11-30T{finished}+00:00")
    assert f"took{told} " in Page(render_html(report, frozenset())).text.replace("took ", "took")
