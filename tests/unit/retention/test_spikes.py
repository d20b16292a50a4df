"""Spikes are found where they were put, and nowhere else."""

import math
import random

import pytest

from validators.retention.policy import SpikeRule
from validators.retention.spikes import find_spikes


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
