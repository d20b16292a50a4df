"""What a process that restores is asked, and what it answers. Plain values, JSON between processes; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorAsk:
    """One tensor of a DCP save: `key` in the catalog, `item` in its metadata, `path` in the state dict, `dtype` as torch names it."""

    key: str
    item: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class FolderAsk:
    """One DCP folder of a save: `inner` is its name inside the save, "" for the save itself. `objects` are item and path."""

    folder: str
    inner: str
    tensors: tuple[TensorAsk, ...]
    objects: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """Load a save at several world sizes. `save_at` is the one at which it is saved again into `again`, 0 for none.

    `group_nbytes` bounds how much is loaded at a time.
    """

    folders: tuple[FolderAsk, ...]
    worlds: tuple[int, ...]
    scratch: str
    save_at: int = 0
    again: str = ""
    group_nbytes: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """Continue training from a save: `resume` is `module:function`, `steps` how many to take."""

    folders: tuple[FolderAsk, ...]
    resume: str
    world: int
    steps: int
    scratch: str


@dataclass(frozen=True, slots=True)
class WorldAnswer:
    """What one world size gave: digests by catalog key, seconds of loading, or why not."""

    world: int
    digests: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """One step of one rank."""

    loss: float
    lr: tuple[float, ...]
    batch: str
    rng: str


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A value of the restored state that is not the saved one; `kind` as in validators.drills.evidence.Difference."""

    key: str
    kind: str
    found: str


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank of a resume gave."""

    rank: int
    steps: tuple[StepAnswer, ...] = ()
    differences: tuple[StateDifference, ...] = ()
    compared: int = 0
    load_seconds: float = 0.0
    first_step_seconds: float = 0.0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class RestoreAnswer:
    """One answer per world size."""

    worlds: tuple[WorldAnswer, ...]


@dataclass(frozen=True, slots=True)
class ResumeAnswer:
    """One answer per rank."""

    ranks: tuple[RankAnswer, ...]
