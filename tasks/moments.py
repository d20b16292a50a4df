"""Where in its training run a checkpoint was made: its step, and the tokens that its trainer had counted by then."""

from collections.abc import Callable, Mapping
from pathlib import Path

from reports.errors import FormatError, HostilePickleError
from reports.moment import Moment
from tasks.engine.formats.reader import Payload
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.restoring.facts import gather_counters
from tasks.engine.tensors.catalog import Catalog, Fragment
from validators.drills.consistency import count_tokens, train_step
from validators.drills.facts import Scalar


def counted_tokens(checkpoint: Path) -> int:
    """Return the tokens that a save's own counter tells.

    Args:
        checkpoint: its folder.

    Returns:
        The counter; 0 where there is none, or the save cannot be read.
    """
    try:
        reader = open_checkpoint(checkpoint)
        return count_tokens(gather_counters(reader.catalog(), reader.payload)) or 0
    except (FormatError, HostilePickleError):
        return 0


def moment_of(step: int | None, values: Mapping[str, Scalar]) -> Moment:
    """Return the moment of a checkpoint whose counters are known.

    Args:
        step: what its folder or its metadata tells.
        values: its plain values.

    Returns:
        The moment; the step is the trainer's own where nothing else tells one.
    """
    return Moment(train_step(values) if step is None else step, count_tokens(values))


def find_moment(catalog: Catalog, payload_of: Callable[[Fragment], Payload]) -> tuple[Moment, tuple[str, ...]]:
    """Return a checkpoint's moment. The trainer's small objects are read, through the closed list.

    Args:
        catalog: of the checkpoint.
        payload_of: its reader's.

    Returns:
        The moment, and a note for the reader of a report where the counters could not be read: weights can be released without them.
    """
    try:
        return moment_of(catalog.step, gather_counters(catalog, payload_of)), ()
    except (FormatError, HostilePickleError) as error:
        return Moment(catalog.step), (f"the trainer's counters were not read: {error}",)
