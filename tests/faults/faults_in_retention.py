"""Planted faults of a run that is thinned out, and the code that must say so."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RetentionFault:
    """A way that a sound, verified run of ten saves is not what retention can act on; `policy` is what its owner wants."""

    name: str
    code: str
    plant: Callable[[Path], object]
    policy: Mapping[str, object] = field(default_factory=dict)
    apply: bool = False


def forget_drills(root: Path) -> None:
    """Lose the history of drills."""
    (root.parent / "runs" / "drills.jsonl").unlink()


def write_after_the_drill(root: Path) -> None:
    """Touch one of the two verified saves after its drill."""
    path = root / "step-90" / "added"
    path.touch()
    os.utime(path, (1e9 + 90, 1e9 + 90))


def lose_the_marker(root: Path) -> None:
    """Take the commit marker of one save away."""
    (root / "step-40" / ".metadata").unlink()


def block_deletion(root: Path) -> None:
    """Put a file where a save is renamed to, so that it cannot be."""
    (root / ".step-10.shardwright-going").write_text("in the way")


def go_back(root: Path) -> None:
    """Write an early step again, after all others."""
    for path in (root / "step-30").iterdir():
        os.utime(path, (2e9, 2e9))


def place_results_nowhere(root: Path) -> None:
    """Results whose file says of no step."""
    (root.parent / "result.json").write_text('{"results": {"arc/acc": 0.5}}')


def leave(_: Path) -> None:
    """The run is sound; it is the policy that cannot be met."""


FAULTS: tuple[RetentionFault, ...] = (
    RetentionFault("no_drill_is_known", "retention.unverified", forget_drills),
    RetentionFault("written_after_its_drill", "retention.unverified", write_after_the_drill),
    RetentionFault("marker_of_a_save_lost", "retention.incomplete", lose_the_marker),
    RetentionFault("training_went_back", "retention.backward", go_back),
    RetentionFault("spikes_wanted_without_a_log", "retention.unlogged", leave, {"pin_spikes": True}),
    RetentionFault("results_of_no_step", "retention.unplaced", place_results_nowhere),
    RetentionFault("budget_below_what_must_stay", "retention.over-budget", leave, {"budget_nbytes": 10}),
    RetentionFault("weights_in_the_same_files", "retention.not-thinned", leave, {"weights_only_every_steps": 20}),
    RetentionFault("save_that_cannot_be_removed", "retention.left", block_deletion, apply=True),
)
