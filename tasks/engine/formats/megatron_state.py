"""What Megatron keeps beside the model: counters, the schedule, random number states; and the tracker that names the newest save."""

from collections.abc import Iterator
from pathlib import Path

from tasks.engine.formats.megatron_files import RankFile, Ranks
from tasks.engine.tensors.catalog import StateItem

TRACKER = "latest_checkpointed_iteration.txt"
COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "seed", "global_batch_size")
_PARTS = ("opt_param_scheduler", "rng_state", "rerun_state_machine", "optimizer", "num_floating_point_operations_so_far")


def read_tracker(root: Path) -> str:
    """Return what a run's tracker says.

    Args:
        root: the run's root.

    Returns:
        Digits or "release"; "" where there is no tracker.
    """
    path = root / TRACKER
    return path.read_bytes()[:64].decode("ascii", "replace").strip() if path.is_file() else ""


def tracker_notes(folder: Path, step: object) -> list[str]:
    """Return what the tracker beside a save says against it.

    Args:
        folder: the save's folder.
        step: its iteration.

    Returns:
        A sentence where the tracker names an earlier save: the writer may not have called this one finished.
    """
    tracked = read_tracker(folder.absolute().parent)
    if type(step) is not int or not tracked.isdigit() or int(tracked) >= step:
        return []
    return [f"{TRACKER} names iteration {tracked}, this is {step}: its writer did not call it finished; what is exported is complete"]


def state_items(ranks: Ranks) -> Iterator[StateItem]:
    """Yield the entries of the training state.

    Args:
        ranks: all files.

    Yields:
        Counters with their values, other parts by name; random number states per rank.
    """
    first = ranks.files[0]
    iteration = first.rest.get("iteration")
    if type(iteration) is int:
        yield StateItem("iteration", "object", value=iteration)
    for name in COUNTERS:
        value = first.args.get(name)
        if type(value) is int:
            yield StateItem(f"args.{name}", "object", value=value)
    yield from _scheduler(first)
    for file in ranks.files:
        yield from (StateItem(f"{file.folder}.{name}", "object") for name in _PARTS[1:] if file.rest.get(name) is not None)


def _scheduler(file: RankFile) -> Iterator[StateItem]:
    held = file.rest.get(_PARTS[0])
    if isinstance(held, dict):
        for name, value in held.items():
            yield StateItem(f"{_PARTS[0]}.{name}", "object", value=value if type(value) is int else None)
