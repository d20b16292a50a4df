"""Everything a drill knows when its checks run. Frozen, plain, and JSON between tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from validators.drills.facts import Record, StateFacts
from validators.drills.goals import Goals, Numbers


@dataclass(frozen=True, slots=True)
class Save:
    """One save under a run's root. `cause` is one word for what is wrong with it, "" when it is complete; `refusal` the sentence.

    `saved_at` is when its newest file was written (seconds since 1970); `leftovers` are temporary or empty files in it. `format` is the
    reader's name, "" where none read it; `also` are the other roots it lies in; `listing` is a digest of its files' names, sizes and times.
    """

    name: str
    path: str
    step: int | None
    cause: str
    refusal: str
    saved_at: float
    nbytes: int
    leftovers: tuple[str, ...]
    format: str = ""
    also: tuple[str, ...] = ()
    listing: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it can be read."""
        return not self.cause


@dataclass(frozen=True, slots=True)
class Damage:
    """A tensor or object that could not be read as its metadata promises."""

    key: str
    what: str


@dataclass(frozen=True, slots=True)
class Drilled:
    """A complete save of which every byte was read. `facts` have the digests found, `record` those written down before, if any."""

    save: Save
    facts: StateFacts
    damage: tuple[Damage, ...]
    record: Record | None
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restored:
    """What torch's own loader gave at one world size: digests by key of the gathered tensors; `refusal` when it could not.

    `saved_again` are the digests our reader finds in a save that those processes made of what they had loaded, `values_again` its values.
    """

    save: str
    world_size: int
    digests: Mapping[str, str]
    refusal: str = ""
    seconds: float = 0.0
    saved_again: Mapping[str, str] | None = None
    values_again: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of one rank. `batch` and `rng` are digests, "" where they were not recorded; `lr` a rate per parameter group."""

    step: int
    rank: int = 0
    loss: float | None = None
    lr: tuple[float, ...] = ()
    batch: str = ""
    rng: str = ""
    tokens: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Restored state that is not the saved one. `part` is what it belongs to; `kind` is "missing", "zero", "moved", "rounded" or "values"
    for a tensor, "value" for anything else.
    """

    key: str
    part: str
    kind: str
    found: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A resume that was tried: the state after the restore, and the steps taken.

    `compared` counts state values held against the saved ones; `saved_by` is how many ranks had saved.
    """

    save: str
    step: int
    world_size: int
    saved_by: int
    steps: tuple[Step, ...]
    differences: tuple[Difference, ...] = ()
    compared: int = 0
    refusal: str = ""
    first_step_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def same_world(self) -> bool:
        """Whether as many ranks ran as had saved."""
        return self.world_size == self.saved_by


@dataclass(frozen=True, slots=True)
class Sabotage:
    """A damaged copy that was shown to the drill: `chosen` is the save it fell back to, "" when it found none; `wanted` the right one."""

    name: str
    refused: bool
    chosen: str
    wanted: str
    cause: str


@dataclass(frozen=True, slots=True)
class PastDrill:
    """One row of the history: what an earlier drill of this run found. Times are ISO 8601; seconds and bytes are of the newest save,
    None where they are not known; so are `step` and `consumed_tokens`. `root` is the run's real path, put there by the history.
    `drilled` are the saves that were read whole, `listings` the digests of their files' names and times before that; `damaged` those that
    could not be.
    """

    run_id: str
    finished: str
    level: str
    step: int | None
    green: bool
    verdict: str
    rto_seconds: float | None
    rpo_seconds: float | None
    nbytes: int
    drilled: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    parameter_order: tuple[str, ...] = ()
    spelling: str = ""
    root: str = ""
    consumed_tokens: int | None = None
    listings: Mapping[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrillEvidence:
    """What is known of a run's checkpoints. `drilled` are the saves that were read, the newest first: damaged ones, the newest sound one,
    and an older one.

    `log` is what the trainer logged; `exported` names the latest green export or gate of the run, "" for none;
    `level` the highest asked for ("D1", "D2", "D3").
    """

    level: str
    saves: tuple[Save, ...]
    pointer: str
    leftovers: tuple[str, ...]
    drilled: tuple[Drilled, ...]
    goals: Goals
    numbers: Numbers
    restored: tuple[Restored, ...] = ()
    resumed: Resumed | None = None
    sabotage: tuple[Sabotage, ...] = ()
    log: tuple[Step, ...] = ()
    history: tuple[PastDrill, ...] = ()
    exported: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> Drilled | None:
        """The newest save of which every byte could be read."""
        return next((drilled for drilled in self.drilled if not drilled.damage), None)

    @property
    def sound(self) -> tuple[Drilled, ...]:
        """The saves of which every byte could be read, the newest first."""
        return tuple(drilled for drilled in self.drilled if not drilled.damage)
