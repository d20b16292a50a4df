"""What Megatron keeps beside the model: counters, the schedule, random number states; and the tracker that names the newest save."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tasks.engine.formats.megatron_args import Arguments
from tasks.engine.formats.megatron_files import Ranks
from tasks.engine.tensors.catalog import StateItem

RELEASE = "release"  # the folder of a converted checkpoint, in place of `iter_%07d`
TRACKER = "latest_checkpointed_iteration.txt"
COUNTERS = (
    *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "seed", "global_batch_size", "seq_length"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size", "world_size"),
    *("expert_tensor_parallel_size", "use_tp_pp_dp_mapping"),
)
SCHEDULE = "opt_param_scheduler"
# How an optimizer is stored → at which layouts Megatron itself resumes it.
RESUMED: Mapping[str, str] = {
    "ranks": "the optimizer is stored rank by rank: Megatron resumes it at the same tp, pp and ep only, at any dp",
    "buckets": "the optimizer is dp_reshardable: Megatron resumes it at the same tp, pp and ep only, at any dp",
    "gathered": "the optimizer is stored per tp and pp rank, gathered over dp: Megatron resumes it at the same tp and pp only, at any dp",
    "parameters": "the optimizer is stored by parameter: Megatron resumes it at any tp, pp, ep and dp",
}
PER_RANK = ("rng_state", "rerun_state_machine", "optimizer", "num_floating_point_operations_so_far")


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
    yield from common_items(ranks.files[0].rest)
    for file in ranks.files:
        yield from (StateItem(f"{file.folder}.{name}", "object") for name in PER_RANK if file.rest.get(name) is not None)


def common_items(held: Mapping[str, object]) -> Iterator[StateItem]:
    """Yield the entries that are the same on every rank.

    Args:
        held: what lies beside the model, by key.

    Yields:
        Counters and the schedule's values.
    """
    iteration = held.get("iteration")
    if type(iteration) is int:
        yield StateItem("iteration", "object", value=iteration)
    version = held.get("checkpoint_version")
    if isinstance(version, (int, float)):
        yield StateItem("checkpoint_version", "object", value=int(version))
    args = held.get("args")
    values = args.values if isinstance(args, Arguments) else {}
    for name in COUNTERS:
        value = values.get(name)
        if isinstance(value, int):  # a flag counts as 0 or 1
            yield StateItem(f"args.{name}", "object", value=int(value))
    for number, group in enumerate(_groups(held.get("optimizer"))):
        step = group.get("step")
        if isinstance(step, (int, float)):
            yield StateItem(f"optimizer.param_groups.{number}.step", "object", value=int(step))
    schedule = held.get(SCHEDULE)
    if isinstance(schedule, dict):
        for key, value in schedule.items():
            yield StateItem(f"{SCHEDULE}.{key}", "object", value=value if type(value) is int else None)


def _groups(optimizer: object) -> Iterator[Mapping[object, object]]:
    # The parameter groups of one optimizer, or of several chained ones.
    for outer in optimizer if isinstance(optimizer, list) else [optimizer]:
        inner = outer.get("optimizer", outer) if isinstance(outer, dict) else None
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        yield from (group for group in groups if isinstance(group, dict)) if isinstance(groups, list) else ()
