"""Save advice against worked examples from the literature, and through the command line."""

import json

import pytest

from validators.retention.advice import Asked, advise, available_period, daly_period

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.parametrize(("save_seconds", "minutes"), [(30, 13.4), (5, 5.5)])
def test_youngs_interval_of_three_hours(save_seconds, minutes):
    # between the end of a save and the begin of the next, as Young counts
    advice = advise(Asked(3 * HOUR, save_seconds, 10**9))
    assert (advice.young_seconds - save_seconds) / MINUTE == pytest.approx(minutes, abs=0.05)


def test_recovery_lengthens_the_interval():
    assert available_period(3 * HOUR, 30, 10 * MINUTE) / MINUTE == pytest.approx(14.3, abs=0.05)


def test_dalys_interval_is_near_youngs_for_cheap_saves_and_the_mtbf_for_dear_ones():
    # sqrt(2 * 30 * 10800) * (1 + sqrt(30 / 21600) / 3 + 30 / 21600 / 9) - 30 = 785.1, and the save
    assert daly_period(3 * HOUR, 30) == pytest.approx(815.1, abs=0.1)
    assert daly_period(100, 200) == 100 + 200


def test_all_three_are_from_begin_to_begin():
    # sqrt(2 * 10800 * 30) = 804.98; what a save of no time leaves is no difference at all
    advice = advise(Asked(3 * HOUR, 30, 10**9))
    assert advice.young_seconds == pytest.approx(834.98, abs=0.01)
    assert advice.daly_seconds == pytest.approx(815.11, abs=0.01)
    assert advice.available_seconds == pytest.approx(835.54, abs=0.01)  # 30 + sqrt(2 * 10800 * 30 + 900)


@pytest.mark.parametrize(("mtbf_seconds", "save_seconds", "recovery_seconds"), [(10_800, 30, 600), (3600, 300, 0), (1000, 400, 2000)])
def test_no_other_period_trains_for_more_of_the_time(mtbf_seconds, save_seconds, recovery_seconds):
    # Of each period its save is lost; of each failure half a period and the recovery.
    def available(period):
        return (period - save_seconds) / period * mtbf_seconds / (mtbf_seconds + recovery_seconds + period / 2)

    best = available_period(mtbf_seconds, save_seconds, recovery_seconds)
    assert available(best) > max(available(best * 1.01), available(best * 0.99))


def test_the_cost_is_a_save_a_period_and_half_a_period_a_failure():
    # 30 of 834.98 seconds; (834.98 / 2 + 600) of 10800 seconds
    advice = advise(Asked(3 * HOUR, 30, 10**9, recovery_seconds=10 * MINUTE, tokens_per_second=1000.0))
    assert advice.save_share == pytest.approx(0.035929, abs=1e-6)
    assert advice.rework_share == pytest.approx(0.094212, abs=1e-6)
    assert advice.tokens_a_day == pytest.approx(0.130141 * 86_400_000, rel=1e-4)


def test_bytes_of_the_run_that_published_them():
    # BLOOM: 176 G parameters, 2.3 TiB full (listed as 2.3 TB), 0.33 TiB weights alone.
    advice = advise(Asked(3 * HOUR, 30, 176 * 10**9))
    assert advice.save_nbytes / 2**40 == pytest.approx(2.3, abs=0.1)
    assert advice.weights_nbytes / 2**40 == pytest.approx(0.33, abs=0.02)


def test_the_budget_holds_what_fits_beside_the_one_in_flight():
    assert advise(Asked(HOUR, 30, 10**9, budget_nbytes=14 * 10**9 * 5)).keep == 3
    assert advise(Asked(HOUR, 30, 10**9, budget_nbytes=14 * 10**9)).keep == 0


@pytest.mark.parametrize(("tenths", "keep"), [(82, 7), (92, 8), (22, 1), (12, 0), (1_000_012, 100_000)])
def test_a_budget_of_exactly_so_many_saves_holds_them(tenths, keep):
    # 1.2 of them are for the one being written
    full = 14 * 10**9 * tenths // 10
    assert advise(Asked(HOUR, 30, 10**9, budget_nbytes=full)).keep == keep
    assert advise(Asked(HOUR, 30, 10**9, budget_nbytes=full - 1)).keep == max(0, keep - 1)


def test_periods_count_their_saves_when_faults_are_found_late():
    # 50 s of training and 10 of a save: an hour and a half is 90 periods of 60 seconds, and 108 of 50
    assert advise(Asked(125, 10, 10**9, detection_seconds=5400)).needed == 91


def test_faults_found_late_need_older_saves():
    advice = advise(Asked(3 * HOUR, 30, 10**9, budget_nbytes=14 * 10**9 * 5, detection_seconds=2 * HOUR))
    assert advice.needed == 10  # two hours end in the ninth period of 13.9 minutes
    assert len(advice.warnings) == 2


def test_the_command_line_speaks_in_units(command_line):
    shown = command_line.run(
        "advise", "--mtbf", "3h", "--save", "30s", "--parameters", "7B", "--budget", "1TB", "--tokens-per-second", "1e5"
    )
    assert shown.returncode == 0, shown.stderr
    assert "every 13 min 55 s (Young)" in shown.stdout
    assert "from the begin of a save to that of the next" in shown.stdout
    assert "the budget holds 9 beside the one being written" in shown.stdout
    machine = json.loads(command_line.run("advise", "--mtbf", "10800", "--save", "0.5min", "--parameters", "7e9", "--json").stdout)
    assert (machine["save_nbytes"], machine["keep"]) == (98 * 10**9, 0)
    machine = json.loads(command_line.run("advise", "--mtbf", "3h", "--save", "30s", "--parameters", "2.3B", "--json").stdout)
    assert machine["weights_nbytes"] == 46 * 10**8  # as floats, 2.3 times 1e9 is a little less


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
