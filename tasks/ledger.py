"""Gathering the ledger: a run's saves with their own counters, its exports, gates and drills."""

from collections.abc import Iterator
from pathlib import Path

from reports.errors import FormatError, HostilePickleError
from reports.model import report_from_json
from tasks.claims import save_of
from tasks.drill_history import read_history
from tasks.engine.formats.folders import step_of
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.restoring.facts import count_ranks, gather_counters
from tasks.sight import see_saves
from validators.drills.consistency import count_tokens, counts_by_rank, train_step
from validators.retention.evidence import SeenSave
from validators.retention.ledger import Counted, Event, LedgerSave

_KINDS = frozenset({"export", "gate"})
_DATA_VERSION = ("data_version", "dataset_version", "data_revision")


def gather_saves(root: Path) -> tuple[LedgerSave, ...]:
    """Return a run's saves with what their own counters tell. Metadata and the trainer's small objects are read.

    Args:
        root: the training run's root.

    Returns:
        Saves, by step.

    Raises:
        FormatError: the root cannot be listed.
    """
    return tuple(_gather(root, seen) for seen in see_saves(root))


def _gather(root: Path, seen: SeenSave) -> LedgerSave:
    if seen.cause:
        return LedgerSave(seen.name, seen.step, seen.cause)
    try:
        reader = open_checkpoint(root / seen.name)
        catalog = reader.catalog()
        values = gather_counters(catalog, reader.payload)
    except (FormatError, HostilePickleError) as error:
        return LedgerSave(seen.name, seen.step, str(error))
    data = next((str(value) for key, value in values.items() if key.rpartition(".")[2] in _DATA_VERSION), "")
    ranks = max(1, count_ranks(catalog)) if counts_by_rank(values) else 1
    return LedgerSave(seen.name, seen.step, "complete", Counted(train_step(values), count_tokens(values), data, ranks))


def gather_events(runs: Path, root: Path) -> tuple[Event, ...]:
    """Return the exports and gates of a run's saves, and its drills.

    Args:
        runs: where run folders and the history of drills are.
        root: the training run's root, resolved.

    Returns:
        Events; of exports and gates by run id, then drills, the oldest first. A report that cannot be read says nothing here: a ledger
        deletes nothing.

    Raises:
        FormatError: the history of drills is damaged.
    """
    drills = [
        Event("drill", past.run_id, step, past.green, None if number else past.consumed_tokens)  # those of the newest save, named first
        for past in read_history(runs, root)
        for number, step in enumerate(step_of(root / name) for name in past.drilled)
        if step is not None
    ]
    return (*_reported(runs, root), *drills)


def _reported(runs: Path, root: Path) -> Iterator[Event]:
    for path in sorted(runs.glob("*/report.json")):
        try:
            report = report_from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not to be read, or of another version
            continue
        name = save_of(Path(report.checkpoint), root) if report.kind in _KINDS else ""
        step = step_of(root / name) if name else None
        if step is not None:
            yield Event(report.kind, report.run_id, step, report.verdict().green, report.moment.consumed_tokens)
