"""What retention knows of a run: its saves as they are seen from outside, who names them, and what was decided of each.

A save is *seen*: its files were listed, and their ends looked at, not read. A *claim* is what keeps a save whatever the policy says.
A *pin* is a place in the run around which saves are kept.
"""

from dataclasses import dataclass
from typing import Literal

Action = Literal["keep", "go", "thin"]
THINNED = "weights only: its training state was deleted"  # the cause of a save that is no longer whole


@dataclass(frozen=True, slots=True)
class SeenSave:
    """One save. `cause` says why it is not complete, "" when it is; `saved_at` is when its newest file was written (seconds since 1970);
    `tokens` are those consumed at its step, 0 where nobody tells. `thinnable` are the files of its training state, where they are apart
    from its weights, and their bytes; `is_stateless` says that its format has them apart, and none is there. `listing` is a digest of its
    files' names, sizes and times; `leaving` are the real paths that links in it lead to outside of it; `linked` are its files that have
    other names too: (inode, names, bytes). `holds_trainer_state` says that Trainer's state is in it.
    """

    name: str
    step: int
    nbytes: int
    saved_at: float
    cause: str = ""
    tokens: int = 0
    thinnable: tuple[str, ...] = ()
    thinnable_nbytes: int = 0
    listing: str = ""
    leaving: tuple[str, ...] = ()
    linked: tuple[tuple[int, int, int], ...] = ()
    is_stateless: bool = False
    holds_trainer_state: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole save."""
        return not self.cause

    @property
    def is_thinned(self) -> bool:
        """Whether its weights alone are left, or will be."""
        return self.cause == THINNED

    @property
    def is_half_thinned(self) -> bool:
        """Whether an interrupted run left a part of the training state it was deleting."""
        return self.is_thinned and bool(self.thinnable)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who names a save, and that is reason enough to keep it."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Pin:
    """A place in the run around which saves are kept: the last one at or before step `before`, and the first at or after step `after`.

    Equal steps pin one save, or its neighbours where there is none.
    """

    before: int
    after: int
    because: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one save, and why. `freed_nbytes` are bytes that going or thinning gives back; `unthinnable` says that thinning was
    wanted, and its files hold the rest too.
    """

    name: str
    step: int
    action: Action
    because: tuple[str, ...]
    nbytes: int
    freed_nbytes: int = 0
    unthinnable: bool = False


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """One decision per save, by step, the oldest first. `unfinished` are folders that an interrupted run left, which go first.

    `blocked` says why nothing may go, "" when it may. `relied_on` are the saves without which nothing may go: they are looked at again
    before each deletion, and whether those `verified` among them still are. `backward` are saves that were written before one of an
    earlier step: training went back.
    """

    root: str
    decisions: tuple[Decision, ...]
    unfinished: tuple[str, ...] = ()
    blocked: str = ""
    relied_on: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()

    def of(self, action: Action) -> tuple[Decision, ...]:
        """Return the decisions of one kind.

        Args:
            action: which.

        Returns:
            Decisions, the oldest save first.
        """
        return tuple(decision for decision in self.decisions if decision.action == action)

    @property
    def freed_nbytes(self) -> int:
        """Bytes that it gives back."""
        return sum(decision.freed_nbytes for decision in self.decisions)
