"""How numbers, bytes, seconds and odd characters read."""

import math

import pytest

from reports.spell import spell_bytes, spell_limits, spell_measure, spell_moment, spell_number, spell_seconds, spell_unseen


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (0.0123456, "0.01235"),
        (1.23467e-9, "1.235e-09"),
        (0.9999969, "1 - 3.1e-06"),
        (1.0, "1"),
        (0.9985, "0.9985"),
        (12345, "12\u202f345"),
        (0, "0"),
        (-7, "-7"),
    ],
)
def test_a_number_shows_four_digits_and_hides_no_nan(value, text):
    assert spell_number(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1023.9 * 1024, "1.00 MiB"), (14_483_464_192, "13.5 GiB"), (2**60, "1024 PiB")],
)
def test_bytes_read_in_binary_units(nbytes, text):
    assert spell_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.0004, "0.4 ms"),
        (0.0999, "0.10 s"),
        (9.999, "10.0 s"),
        (59.97, "1 min 00 s"),
        (184, "3 min 04 s"),
        (7500, "2 h 05 min"),
        (math.nan, "NaN"),
    ],
)
def test_seconds_read_in_the_unit_a_reader_would_pick(seconds, text):
    assert spell_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("a\nb\x00\x1b[31m", r"a\x0ab\x00\x1b[31m"),
        ("evil\u202egnp.exe", r"evil\u202egnp.exe"),
        ("zero\u200bwidth", r"zero\u200bwidth"),
        ("lone\ud800", r"lone\ud800"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("größe 模型", "größe 模型"),
    ],
)
def test_what_shows_nothing_is_written_as_its_escape(text, spelled):
    assert spell_unseen(text) == spelled


def test_truth_values_read_as_words_and_not_as_numbers():
    assert (spell_measure(True), spell_measure(False), spell_measure(1)) == ("yes", "no", "1")


def test_a_limit_nothing_was_measured_for_is_still_shown():
    assert spell_limits({"mean_kl": math.nan}, {"mean_kl": 0.1, "top1": 0.99}) == [("mean_kl", "NaN", "0.1"), ("top1", "", "0.99")]


def test_a_moment_reads_in_utc_whatever_its_offset():
    assert spell_moment("2026-11-29T17:05:38+01:00") == "2026-11-29 16:05:38 UTC"
