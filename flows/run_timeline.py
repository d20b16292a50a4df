"""What happened in a training run, as marks on the timeline of a report."""

from collections.abc import Iterator, Sequence

from reports.model import Mark
from validators.retention.evaluations import Evaluation
from validators.retention.ledger import Event, find_gaps
from validators.retention.pins import spell_switch, spikes_of, switches_of
from validators.retention.policy import RetentionPolicy
from validators.retention.training_log import LogLine


def mark_run(
    log: Sequence[LogLine], policy: RetentionPolicy, events: Sequence[Event], evaluations: Sequence[Evaluation] = ()
) -> Iterator[Mark]:
    """Yield what the log shows, and what was made of the run's saves.

    Args:
        log: lines, by step.
        policy: what counts as a spike.
        events: exports, gates and drills.
        evaluations: results.

    Yields:
        Marks, lane by lane.
    """
    yield from (Mark("spike", spike.first, spike.last, spike.spell()) for spike in spikes_of(log, policy))
    yield from (Mark("data switch", late.step, late.step, spell_switch(early, late)) for early, late in switches_of(log))
    yield from (Mark("gap in the log", first, last, f"steps {first} to {last} are not logged") for first, last in find_gaps(log))
    for event in sorted(events, key=lambda event: event.kind):
        yield Mark(event.kind, event.step, event.step, f"{event.run_id}, {'green' if event.green else 'red'}")
    yield from (Mark("evaluation", one.step, one.step, one.where) for one in evaluations if one.step is not None)
