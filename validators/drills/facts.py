"""What a drill sees of a checkpoint: plain values, no torch.

An *entry* is a tensor or an object of the checkpoint, under the name by which two readings of it are compared. A *slot* is what an
optimizer keeps per parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

Scalar = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or object. `role` is "model", "state" (an optimizer's tensor), "other" or "object"; `digest` is the sha256 of its values
    in C order, or of an object's stored bytes; `is_zero` whether every value is zero.
    """

    key: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str = ""
    is_zero: bool = False

    @property
    def numel(self) -> int:
        """Elements of a tensor."""
        return prod(self.shape)

    @property
    def slot(self) -> str:
        """What it is of its parameter; "" for what is no optimizer's."""
        return self.key.partition("/")[0] if self.role == "state" else ""

    @property
    def parameter(self) -> str:
        """The parameter it belongs to; a model tensor's own name."""
        return self.key.partition("/")[2] if self.role == "state" else self.key


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What metadata and small objects say.

    `values` are the numbers and texts inside the state's objects, by dotted key, and the 0-d tensors' values by theirs; `keys` the dotted
    keys of everything else inside; `unread` says of objects that were not opened why; `files` are the folder's names; `rank_names` those
    by which the ranks' files go, in numeric order, none where names do not tell; `fragments` the most parts a tensor is in.
    """

    format: str
    root: str
    step: int | None
    entries: Mapping[str, Entry]
    values: Mapping[str, Scalar]
    keys: tuple[str, ...]
    unread: Mapping[str, str]
    files: tuple[str, ...]
    rank_names: tuple[str, ...]
    fragments: int
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks have files; 0 where names do not tell."""
        return len(self.rank_names)

    def of_role(self, role: str) -> list[Entry]:
        """Return the entries of one role.

        Args:
            role: see Entry.

        Returns:
            Entries, in the catalog's order.
        """
        return [entry for entry in self.entries.values() if entry.role == role]

    def slots(self) -> dict[str, list[Entry]]:
        """Return what the optimizer keeps.

        Returns:
            Slot → its entries.
        """
        found: dict[str, list[Entry]] = {}
        for entry in self.of_role("state"):
            found.setdefault(entry.slot, []).append(entry)
        return found

    def names(self) -> list[str]:
        """Return every name under which something lies.

        Returns:
            Keys of entries that are no parameter's, and the dotted keys inside objects.
        """
        outer = [entry.key.removeprefix("other/") for entry in self.entries.values() if entry.role in ("other", "object")]
        return [*outer, *self.values, *self.keys]


@dataclass(frozen=True, slots=True)
class Record:
    """Digests that were written down at save time or by an earlier drill. `made_by` is "record" or "drill"."""

    made: str
    made_by: str
    entries: Mapping[str, Entry]
    versions: Mapping[str, str] = field(default_factory=dict)
