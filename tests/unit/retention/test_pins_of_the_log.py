"""Pins beside switches of the data: new versions and lasting returns, not the turns of a mixture."""

import pytest

from validators.retention.pins import find_signs, propose_pins
from validators.retention.policy import RetentionPolicy, SpikeRule
from validators.retention.training_log import LogLine

POLICY = RetentionPolicy(spikes=SpikeRule(window=10))


def _pinned(data: str, every: int = 1) -> list[tuple[int, int]]:
    log = [LogLine(number * every, 2.0, 0, "" if version == "-" else version) for number, version in enumerate(data, 1)]
    return [(pin.before, pin.after) for pin in propose_pins(find_signs(log, POLICY), POLICY)]


@pytest.mark.parametrize(
    ("data", "pins"),
    [
        ("a" * 30, []),
        ("a" * 30 + "b" * 30, [(30, 31)]),
        ("a" * 30 + "b" * 2, [(30, 31)]),
        ("a" * 30 + "-" * 5 + "b" * 30, [(30, 36)]),
        ("ab" * 1000, [(1, 2)]),
        ("abc" * 1000, [(1, 2), (2, 3)]),
        ("a" * 20 + "b" * 20 + "a" * 20, [(20, 21), (40, 41)]),
        ("a" * 20 + "b" * 3 + "a" * 9, [(20, 21)]),
        ("a" * 20 + "b" * 3 + "a" * 10, [(20, 21), (23, 24)]),
        ("ab" * 20 + "b" * 20, [(1, 2), (39, 40)]),
    ],
    ids=["one", "two", "just begun", "not told between", "mixture", "of three", "back", "back for short", "back to stay", "end of one"],
)
def test_where_the_data_switches(data, pins):
    assert _pinned(data) == pins
