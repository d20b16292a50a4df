"""What happened in a training run, as marks on the timeline of a report."""

from collections.abc import Iterator, Sequence

from reports.model import Mark
from validators.retention.evaluations import Evaluation
from validators.retention.ledger import Event
from validators.retention.pins import LogSigns, find_signs, spell_switch
from validators.retention.policy import RetentionPolicy
from validators.retention.training_log import LogLine


def mark_run(
    log: Sequence[LogLine],
    policy: RetentionPolicy,
    events: Sequence[Event],
    evaluations: Sequence[Evaluation] = (),
    signs: LogSigns | None = None,
) -> Iterator[Mark]:
    """Yield what the log shows, and what was made of the run's saves.

    Args:
        log: lines, by step.
        policy: what counts as a spike.
        events: exports, gates and drills.
        evaluations: results.
        signs: what the log shows, where that has been found already.

    Yields:
        Marks, lane by lane.
    """
    signs = signs or find_signs(log, policy)
    yield from (Mark("spike", spike.first, spike.last, spike.spell()) for spike in signs.spikes)
    yield from (Mark("data switch", late.step, late.step, spell_switch(early, late)) for early, late in signs.switches)
    yield from (Mark("gap in the log", first, last, f"steps {first} to {last} are not logged") for first, last in signs.gaps)
    for event in sorted(events, key=lambda event: event.kind):
        yield Mark(event.kind, event.step, event.step, f"{event.run_id}, {'green' if event.green else 'red'}")
    yield from (Mark("evaluation", one.step, one.step, one.where) for one in evaluations if one.step is not None)
