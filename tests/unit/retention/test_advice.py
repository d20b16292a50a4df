"""Save advice against worked examples from the literature, and through the command line."""

import json

import pytest

from validators.retention.advice import Asked, advise, available_interval, daly_interval

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.parametrize(("save_seconds", "minutes"), [(30, 13.4), (5, 5.5)])
def test_youngs_interval_of_three_hours(save_seconds, minutes):
    advice = advise(Asked(3 * HOUR, save_seconds, 10**9))
    assert advice.young_seconds / MINUTE == pytest.approx(minutes, abs=0.05)


def test_recovery_lengthens_the_interval():
    assert available_interval(3 * HOUR, 30, 10 * MINUTE) / MINUTE == pytest.approx(14.3, abs=0.05)


def test_dalys_interval_is_near_youngs_for_cheap_saves_and_the_mtbf_for_dear_ones():
    # sqrt(2 * 30 * 10800) * (1 + sqrt(30 / 21600) / 3 + 30 / 21600 / 9) - 30
    assert daly_interval(3 * HOUR, 30) == pytest.approx(785.1, abs=0.1)
    assert daly_interval(100, 200) == 100


def test_bytes_of_the_run_that_published_them():
    # BLOOM: 176 G parameters, 2.3 TiB full (listed as 2.3 TB), 0.33 TiB weights alone.
    advice = advise(Asked(3 * HOUR, 30, 176 * 10**9))
    assert advice.save_nbytes / 2**40 == pytest.approx(2.3, abs=0.1)
    assert advice.weights_nbytes / 2**40 == pytest.approx(0.33, abs=0.02)


def test_the_budget_holds_what_fits_beside_the_one_in_flight():
    assert advise(Asked(HOUR, 30, 10**9, budget_nbytes=14 * 10**9 * 5)).keep == 3
    assert advise(Asked(HOUR, 30, 10**9, budget_nbytes=14 * 10**9)).keep == 0


def test_faults_found_late_need_older_saves():
    advice = advise(Asked(3 * HOUR, 30, 10**9, budget_nbytes=14 * 10**9 * 5, detection_seconds=2 * HOUR))
    assert advice.needed == 10  # two hours are nine intervals of 13.4 minutes
    assert len(advice.warnings) == 2


def test_the_command_line_speaks_in_units(command_line):
    shown = command_line.run(
        "advise", "--mtbf", "3h", "--save", "30s", "--parameters", "7B", "--budget", "1TB", "--tokens-per-second", "1e5"
    )
    assert shown.returncode == 0, shown.stderr
    assert "every 13 min 25 s (Young)" in shown.stdout
    assert "the budget holds 9 beside the one being written" in shown.stdout
    machine = json.loads(command_line.run("advise", "--mtbf", "10800", "--save", "0.5min", "--parameters", "7e9", "--json").stdout)
    assert (machine["save_nbytes"], machine["keep"]) == (98 * 10**9, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mtbf", "3weeks", "--save", "30s", "--parameters", "7B"),
        ("--mtbf", "0", "--save", "30s", "--parameters", "7B"),
        ("--mtbf", "3h", "--save", "-1", "--parameters", "7B"),
        ("--mtbf", "3h", "--save", "30s", "--parameters", "0.5"),
        ("--mtbf", "3h", "--save", "30s", "--parameters", "7B", "--budget", "much"),
        ("--mtbf", "1e99", "--save", "30s", "--parameters", "7B"),
    ],
)
def test_quantities_that_are_none_are_refused(command_line, arguments):
    ended = command_line.run("advise", *arguments)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)


@pytest.mark.parametrize(("save_seconds", "recovery_seconds"), [(3 * HOUR, 0), (30, 4 * HOUR), (6 * HOUR, HOUR)])
def test_more_than_all_of_the_time_cannot_be_lost(save_seconds, recovery_seconds):
    advice = advise(Asked(3 * HOUR, save_seconds, 10**9, recovery_seconds=recovery_seconds, tokens_per_second=10.0))
    assert advice.save_share + advice.rework_share == pytest.approx(1)
    assert advice.tokens_a_day == pytest.approx(24 * HOUR * 10)
    assert "training does not advance" in str(advice.warnings)


def test_a_run_that_advances_is_not_warned():
    assert advise(Asked(3 * HOUR, 30, 10**9, recovery_seconds=10 * MINUTE)).warnings == ()


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--mtbf", "0", "Give more than 0."),
        ("--mtbf", "1e400", "Give less than 1e+18."),
        ("--parameters", "0", "Give at least 1."),
        ("--budget", "0", "leave --budget out"),
    ],
)
def test_what_may_be_given_instead_is_said(command_line, option, value, told):
    given = {"--mtbf": "3h", "--save": "30s", "--parameters": "7B"} | {option: value}
    ended = command_line.run("advise", *(word for pair in given.items() for word in pair))
    assert ended.returncode == 2
    assert told in ended.stderr
