"""What happened in a training run, as marks on the timeline of a report."""

from collections.abc import Iterator, Sequence

from reports.model import Mark
from validators.retention.evaluations import Evaluation
from validators.retention.ledger import Event
from validators.retention.pins import LogSigns, spell_switch


def mark_run(signs: LogSigns, events: Sequence[Event], evaluations: Sequence[Evaluation]) -> Iterator[Mark]:
    """Yield what the log shows, and what was made of the run's saves.

    Args:
        signs: what the log shows.
        events: exports, gates and drills.
        evaluations: results.

    Yields:
        Marks, lane by lane.
    """
    yield from (Mark("spike", spike.first, spike.last, spike.spell()) for spike in signs.spikes)
    yield from (Mark("data switch", late.step, late.step, spell_switch(early, late)) for early, late in signs.switches)
    yield from (Mark("gap in the log", first, last, f"steps {first} to {last} are not logged") for first, last in signs.gaps)
    for event in sorted(events, key=lambda event: event.kind):
        yield Mark(event.kind, event.step, event.step, f"{event.run_id}, {'green' if event.green else 'red'}")
    yield from (Mark("evaluation", one.step, one.step, one.where) for one in evaluations if one.step is not None)
