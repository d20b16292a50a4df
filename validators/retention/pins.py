"""What the training log shows, and what it proposes to keep for it: saves on both sides of each loss spike, and of each switch of the data.

A *switch* is to a version of the data that no line before had, or back to an older one that then lasts for a window of spikes: data that
alternates from line to line is a mixture, which begins with its second version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from validators.retention.cadence import find_gaps
from validators.retention.evidence import Pin, SeenSave
from validators.retention.policy import RetentionPolicy
from validators.retention.spikes import Spike, find_spikes
from validators.retention.training_log import LogLine

_OF_LOG = frozenset({"pin_spikes", "pin_data_switches", "spikes"})  # fields of the policy that do nothing without a log


@dataclass(frozen=True, slots=True)
class LogSigns:
    """What a log shows, by step: its loss spikes; of each switch of data the last line on the old and the first on the new; first and last
    step of each gap.
    """

    spikes: tuple[Spike, ...] = ()
    switches: tuple[tuple[LogLine, LogLine], ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()


def find_signs(log: Sequence[LogLine], policy: RetentionPolicy) -> LogSigns:
    """Return what a log shows. Of a long log this takes seconds: once per command.

    Args:
        log: the run's, in order of steps.
        policy: what counts as a spike.

    Returns:
        Its spikes, switches and gaps.
    """
    losses = [(line.step, line.loss) for line in log if line.loss is not None]
    return LogSigns(find_spikes(losses, policy.spikes), switches_of(log, policy.spikes.window), find_gaps(log))


def propose_pins(signs: LogSigns, policy: RetentionPolicy) -> tuple[Pin, ...]:
    """Return the pins that a log is reason for.

    Args:
        signs: what the log shows.
        policy: whether spikes and switches are pinned.

    Returns:
        Pins: of spikes, then of switches.
    """
    spikes = signs.spikes if policy.pin_spikes else ()
    switches = signs.switches if policy.pin_data_switches else ()
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


def switches_of(log: Sequence[LogLine], lasting: int) -> tuple[tuple[LogLine, LogLine], ...]:
    """Return where the data changed.

    Args:
        log: lines, by step.
        lasting: so many lines on data that was there before are a switch back to it.

    Returns:
        The last line on the old data, the first on the new.
    """
    switches = []
    seen: set[str] = set()
    early: LogLine | None = None
    for version, here in groupby((line for line in log if line.data), key=attrgetter("data")):
        lines = list(here)
        if early is not None and (version not in seen or len(lines) >= lasting):
            switches.append((early, lines[0]))
        seen.add(version)
        early = lines[-1]
    return tuple(switches)


def spell_switch(early: LogLine, late: LogLine) -> str:
    """Return a change of the data in words.

    Args:
        early: the last line on the old data.
        late: the first on the new.

    Returns:
        A phrase.
    """
    return f"the switch of data at step {late.step}, from {early.data} to {late.data}"
