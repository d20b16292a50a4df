"""Compare logits on a small batch: the mapping against a witness, the cast against the merged values."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.handover import Compared, Loaded, Planned


@task(name="compare logits", cache_policy=NO_CACHE)
def compare_logits(loaded: Loaded, planned: Planned, folder: Path, run_folder: Path, golden: Path | None, memory_nbytes: int) -> Compared:
    """Run the release and hold its logits against what is known.

    Args:
        loaded: the checkpoint.
        planned: the plan.
        folder: the stage.
        run_folder: for what must be written on the way.
        golden: recorded logits.
        memory_nbytes: what models may take.

    Returns:
        The comparisons.
    """
    return Compared(reason="not built yet")
