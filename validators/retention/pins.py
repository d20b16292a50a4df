"""What the training log proposes to keep: saves on both sides of each loss spike, and of each change of the data."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from validators.retention.evidence import Pin
from validators.retention.policy import RetentionPolicy
from validators.retention.spikes import find_spikes
from validators.retention.training_log import LogLine


def propose_pins(log: Sequence[LogLine], policy: RetentionPolicy) -> tuple[Pin, ...]:
    """Return the pins that a log is reason for.

    Args:
        log: the run's log, in order of steps.
        policy: what counts as a spike, and whether spikes and switches are pinned.

    Returns:
        Pins: of spikes, then of switches.
    """
    spikes = _of_spikes(log, policy) if policy.pin_spikes else ()
    return (*spikes, *(_of_switches(log) if policy.pin_data_switches else ()))


def _of_spikes(log: Sequence[LogLine], policy: RetentionPolicy) -> Iterator[Pin]:
    losses = [(line.step, line.loss) for line in log if line.loss is not None]
    for spike in find_spikes(losses, policy.spikes):
        steps = f"step {spike.first}" if spike.first == spike.last else f"steps {spike.first} to {spike.last}"
        yield Pin(spike.first - 1, spike.last + 1, f"beside the loss spike at {steps}: {spike.loss:.4g} where {spike.usual:.4g} was usual")


def _of_switches(log: Sequence[LogLine]) -> Iterator[Pin]:
    for early, late in pairwise(line for line in log if line.data):
        if early.data != late.data:
            yield Pin(early.step, late.step, f"beside the switch of data at step {late.step}, from {early.data} to {late.data}")
