"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.requests import parse_size
from reports.spell import format_bytes

FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@given(st.integers(0, 10**6), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", "B", "b"]), st.sampled_from(["", " "]))
def test_a_whole_number_with_a_unit_is_exact(number, unit, byte, space):
    assert parse_size(f"{number}{space}{unit}{byte}") == number * FACTORS[unit]
    assert parse_size(f"{number}{unit.lower()}{byte}") == number * FACTORS[unit]


@given(st.integers(0, 2**63))
def test_a_number_of_bytes_stays_as_it_is(number):
    assert parse_size(number) == number
    assert parse_size(str(number)) == number


@pytest.mark.parametrize("text", ["", "GB", "5 GBB", "-1", "1e9", "five", "5PB", "1.GB", "0x10"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write 5GB, 512MiB"):
        parse_size(text)


@given(st.integers(0, 10**15))
def test_what_is_shown_is_within_half_a_percent_of_the_truth(number):
    shown, unit = format_bytes(number).split()
    factor = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert abs(float(shown) * factor - number) <= 0.005 * number
