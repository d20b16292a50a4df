"""A gap is a stretch longer than is usual beside it; a run that begins to log less often, or more, leaves nothing out."""

import pytest

from validators.retention.cadence import find_gaps, is_gap_after
from validators.retention.training_log import LogLine


def _log(*steps):
    return [LogLine(step) for step in steps]


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [7],
        [7, 20],
        range(1, 600),
        range(10, 600, 10),
        [*range(1, 601), *range(610, 6000, 10)],
        [*range(10, 601, 10), *range(601, 900)],
        [*range(1, 606), *range(610, 6000, 10)],
        [1, *range(10, 600, 10)],
        [*range(10, 601, 10), 603],
        [*range(1, 601), 610, 620, 630],
        [10, 20, 30, *range(31, 600)],
        [step for step in range(600) if step % 10 in (0, 1)],
    ],
    ids=lambda one: f"{len(one)}",
)
def test_a_cadence_and_its_change_are_no_gap(steps):
    assert find_gaps(_log(*steps)) == ()


@pytest.mark.parametrize(
    ("steps", "gaps"),
    [
        ([*range(1, 521), *range(540, 601)], ((521, 539),)),
        ([*range(10, 521, 10), *range(540, 601, 10)], ((521, 539),)),
        ([*range(1, 101), *range(102, 200)], ((101, 101),)),
        ([*range(1, 101), *range(120, 130), *range(150, 200)], ((101, 119), (130, 149))),
        ([*range(1, 101), *range(120, 122), *range(141, 200)], ((101, 119), (122, 140))),
        ([*range(1, 601), *range(610, 900, 10), *range(930, 1200, 10)], ((891, 929),)),
        ([*range(1, 601), *range(640, 1200, 10)], ((601, 639),)),
        ([*range(1, 101), 120], ((101, 119),)),
        ([0, *range(20, 100)], ((1, 19),)),
        ([*range(10, 101, 10), *range(150, 160)], ((101, 149),)),
    ],
    ids=lambda one: f"{len(one)}",
)
def test_a_stretch_that_is_left_out_is_named(steps, gaps):
    log = _log(*steps)
    assert find_gaps(log) == gaps
    assert tuple((log[at].step + 1, log[at + 1].step - 1) for at in range(len(log) - 1) if is_gap_after(log, at)) == gaps


def test_lines_that_are_rarer_than_their_neighbours_are_no_cadence():
    # Usual is the median: one close pair among tens makes no gaps of the others.
    assert find_gaps(_log(*range(10, 200, 10), 191, *range(200, 400, 10))) == ()
