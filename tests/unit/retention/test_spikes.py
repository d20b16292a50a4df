"""Spikes are found where they were put, and nowhere else."""

import math
import random
import time
from statistics import median

import pytest

from validators.retention.policy import SpikeRule
from validators.retention.spikes import Spike, find_spikes


def _losses(steps: int = 400, every: int = 1, noise: float = 0.05, seed: int = 1, **spikes: float) -> list[tuple[int, float]]:
    draw = random.Random(seed)
    added = {int(name.removeprefix("at_")): rise for name, rise in spikes.items()}
    return [
        (step, 3.0 - step / every / 400 + draw.gauss(0, noise) + added.get(step, 0.0)) for step in range(every, steps * every + 1, every)
    ]


@pytest.mark.parametrize("seed", range(100))
def test_honest_noise_is_no_spike(seed):
    assert find_spikes(_losses(seed=seed), SpikeRule()) == ()


def test_three_spikes_of_a_short_run_are_three():
    found = find_spikes(_losses(steps=100, at_30=1.5, at_45=1.2, at_60=2.0), SpikeRule())
    assert [spike.first for spike in found] == [30, 45, 60]


def test_a_falling_loss_without_any_noise_is_no_spike():
    assert find_spikes(_losses(noise=0.0), SpikeRule()) == ()


@pytest.mark.parametrize("every", [1, 10])
def test_each_spike_is_found_with_its_ends(every):
    found = find_spikes(_losses(every=every, **{f"at_{100 * every}": 1.0, f"at_{101 * every}": 0.9, f"at_{300 * every}": 2.0}), SpikeRule())
    assert [(spike.first, spike.last) for spike in found] == [(100 * every, 101 * every), (300 * every, 300 * every)]


def test_a_spike_does_not_hide_the_next():
    found = find_spikes(_losses(at_200=50.0, at_240=1.0), SpikeRule())
    assert [spike.first for spike in found] == [200, 240]


def test_a_loss_that_is_no_number_is_a_spike():
    losses = [(step, math.nan if step == 150 else loss) for step, loss in _losses()]
    (spike,) = find_spikes(losses, SpikeRule())
    assert (spike.first, spike.last) == (150, 150)


def test_a_lasting_rise_is_one_spike_and_then_the_new_level():
    losses = [(step, loss + (2.0 if step > 200 else 0.0) + (2.0 if step == 350 else 0.0)) for step, loss in _losses()]
    found = find_spikes(losses, SpikeRule())
    assert [spike.first for spike in found] == [201, 350]


def test_the_first_steps_are_too_few_to_judge():
    assert find_spikes(_losses(at_3=9.0), SpikeRule()) == ()


def _plainly(losses: list[tuple[int, float]], rule: SpikeRule) -> list[int]:
    # Hampel's rule as it is written, with sorting; a whole window that stands out is the new level.
    calm: list[float] = []
    found, row = [], []
    for step, loss in losses:
        window = calm[-rule.window :]
        usual = median(window) if window else 0.0
        rise = max(rule.deviations * 1.4826 * median(abs(one - usual) for one in window), rule.floor * abs(usual)) if window else 0.0
        if len(window) >= max(5, rule.window // 4) and loss > usual + rise:
            found.append(step)
            row.append(loss)
            if len(row) == rule.window:
                calm, row = row, []
        else:
            calm.append(loss)
            row = []
    return found


@pytest.mark.parametrize("window", [8, 9, 20, 51])
@pytest.mark.parametrize("seed", range(10))
def test_what_stands_out_is_what_sorting_each_window_finds(window, seed):
    draw = random.Random(seed)
    rule = SpikeRule(window=window, deviations=2.0, floor=0.0)
    losses = [(step, round(draw.gauss(3, 0.3), draw.choice((1, 3)))) for step in range(600)]  # many are equal
    expected = _plainly(losses, rule)
    found = find_spikes(losses, rule)
    assert len(expected) > 10
    assert {step for spike in found for step in (spike.first, spike.last)} <= set(expected)
    assert all(any(spike.first <= step <= spike.last for spike in found) for step in expected)


def test_a_deviation_is_that_of_normal_noise():
    # The median is 100 and the median absolute deviation 1, so that three deviations end at 100 + 3 * 1.4826.
    rule = SpikeRule(window=20, deviations=3.0, floor=0.0)
    noise = [(step, (99.0, 101.0, 100.0, 99.0, 101.0)[step % 5]) for step in range(20)]
    assert find_spikes([*noise, (20, 104.4)], rule) == ()
    assert find_spikes([*noise, (20, 104.5)], rule) == (Spike(20, 20, 104.5, 100.0),)


def test_spikes_that_come_and_go_are_no_new_level():
    # Ten of a window of ten in all, but never ten in a row: the usual loss stays 3.
    losses = [(step, 9.0 if step % 20 == 19 else 3.0 + 0.001 * (step % 3)) for step in range(400)]
    found = find_spikes(losses, SpikeRule(window=10))
    assert [spike.first for spike in found] == list(range(19, 400, 20))
    assert all(3.0 <= spike.usual <= 3.01 for spike in found)


def test_what_is_no_number_is_the_highest_of_its_spike():
    losses = [(step, {150: 9.0, 151: math.nan, 152: 8.0}.get(step, loss)) for step, loss in _losses()]
    (spike,) = find_spikes(losses, SpikeRule())
    assert (spike.first, spike.last) == (150, 152)
    assert math.isnan(spike.loss)


def test_a_line_out_of_turn_does_not_part_a_spike():
    losses = [(step, loss + (2.0 if 500 <= step <= 540 else 0.0)) for step, loss in _losses(steps=100, every=10, noise=0.01)]
    odd = sorted([*losses, (11, 3.0)])
    assert [(spike.first, spike.last) for spike in find_spikes(odd, SpikeRule())] == [(500, 540)]


def test_a_long_log_with_many_spikes_takes_no_long_time():
    # A thousand spikes among fifty thousand steps took twenty seconds when each looked through the whole log.
    draw = random.Random(1)
    losses = [(step, draw.gauss(3, 0.01) + (2.0 if step % 50 == 0 else 0.0)) for step in range(1, 50_000)]
    begun = time.process_time()
    assert len(find_spikes(losses, SpikeRule())) == 999
    assert len(find_spikes(losses, SpikeRule(window=1000))) == 1  # a hundred steps apart are one
    assert time.process_time() - begun < 5
