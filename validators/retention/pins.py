"""What the training log proposes to keep: saves on both sides of each loss spike, and of each change of the data."""

from collections.abc import Sequence
from itertools import pairwise

from validators.retention.evidence import Pin, SeenSave
from validators.retention.policy import RetentionPolicy
from validators.retention.spikes import Spike, find_spikes
from validators.retention.training_log import LogLine

_OF_LOG = frozenset({"pin_spikes", "pin_data_switches", "spikes"})  # fields of the policy that do nothing without a log


def propose_pins(log: Sequence[LogLine], policy: RetentionPolicy) -> tuple[Pin, ...]:
    """Return the pins that a log is reason for.

    Args:
        log: the run's log, in order of steps.
        policy: what counts as a spike, and whether spikes and switches are pinned.

    Returns:
        Pins: of spikes, then of switches.
    """
    spikes = spikes_of(log, policy) if policy.pin_spikes else ()
    switches = switches_of(log) if policy.pin_data_switches else ()
    beside_spikes = (Pin(spike.first - 1, spike.last + 1, f"beside the loss spike at {spike.spell()}") for spike in spikes)
    beside_switches = (Pin(early.step, late.step, f"beside {spell_switch(early, late)}") for early, late in switches)
    return (*beside_spikes, *beside_switches)


def list_unlogged(saves: Sequence[SeenSave], log: Sequence[LogLine], policy: RetentionPolicy) -> tuple[str, ...]:
    """Return the complete saves beside which a log cannot show what the policy pins.

    Args:
        saves: of the run.
        log: the run's log, in order of steps; empty without one.
        policy: what is pinned.

    Returns:
        Names of the saves outside of what the log tells a loss, or a version of the data, of. Without a log all of them, if the policy asks
        for such pins in so many words.
    """
    if not log and not policy.model_fields_set & _OF_LOG:
        return ()
    told = [line.step for line in log if (policy.pin_spikes and line.loss is not None) or (policy.pin_data_switches and line.data)]
    if not (policy.pin_spikes or policy.pin_data_switches):
        return ()
    first, last = (min(told), max(told)) if told else (0, -1)
    return tuple(save.name for save in saves if save.is_complete and not first <= save.step <= last)


def spikes_of(log: Sequence[LogLine], policy: RetentionPolicy) -> tuple[Spike, ...]:
    """Return the spikes of a logged loss.

    Args:
        log: lines, by step.
        policy: what counts as one.

    Returns:
        Spikes, by step.
    """
    return find_spikes([(line.step, line.loss) for line in log if line.loss is not None], policy.spikes)


def switches_of(log: Sequence[LogLine]) -> tuple[tuple[LogLine, LogLine], ...]:
    """Return where the data changed.

    Args:
        log: lines, by step.

    Returns:
        The last line on the old data, the first on the new.
    """
    return tuple((early, late) for early, late in pairwise(line for line in log if line.data) if early.data != late.data)


def spell_switch(early: LogLine, late: LogLine) -> str:
    """Return a change of the data in words.

    Args:
        early: the last line on the old data.
        late: the first on the new.

    Returns:
        A phrase.
    """
    return f"the switch of data at step {late.step}, from {early.data} to {late.data}"
