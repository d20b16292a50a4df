"""Witness *second copy*: what a checkpoint holds twice. DeepSpeed keeps the weights in the precision of training beside the fp32 masters:
whole tensors by name in the model states (ZeRO-1 and -2), per layer (pipelines) and per expert. A master, rounded, is that copy.

Where masters were exported of Megatron, the model's own weights are that copy.

So it holds a release against values that were never cut over ranks: a wrong walk of the vectors, a wrong tie or a wrong expert shows even
where the second path would make the same mistake. Under ZeRO-3 the model states hold no weights, and it is not heard.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.megatron import decode_megatron, decode_megatron_dist
from tasks.witnesses.second_path import SecondPath
from tasks.witnesses.sources import Stored
from tasks.witnesses.zero_saves import decode_copies
from validators.tables import SECOND_COPY

# By the format the plan names.
COPIES: Mapping[str, Callable[[tuple[Path, ...]], Stored]] = {"zero": decode_copies, "universal": decode_copies}
COPIES_OF_MASTERS: Mapping[str, Callable[[tuple[Path, ...]], Stored]] = {"megatron": decode_megatron, "megatron_dist": decode_megatron_dist}


def find_copies(format_name: str, *, of_masters: bool) -> Callable[[tuple[Path, ...]], Stored] | None:
    """Return what decodes the second copies that a format holds.

    Args:
        format_name: as the plan names it.
        of_masters: whether the optimizer's masters were exported in the place of the model's weights.

    Returns:
        The decoder; None where a format never holds weights twice.
    """
    return (COPIES_OF_MASTERS if of_masters else COPIES).get(format_name)


# Release dtype → dtypes of copies it can be held against: the wider of the two is rounded to the other.
COMPARABLE: Mapping[str, frozenset[str]] = {
    "F32": frozenset({"F32", "BF16", "F16"}),
    "BF16": frozenset({"F32", "BF16"}),
    "F16": frozenset({"F32", "F16"}),
}


class SecondCopy(SecondPath):
    """The witness. Targets that the checkpoint holds only once are not among its `targets`.

    Args:
        plan_path: the plan, as JSON.
        source_roots: the source's folders, the main one first.

    Raises:
        NotHeardError: the source holds nothing twice.
        FormatError: the source is damaged.
    """

    name = SECOND_COPY

    def __init__(self, plan_path: Path, source_roots: tuple[Path, ...]) -> None:
        super().__init__(plan_path, source_roots)
        decode = find_copies(self.source_format, of_masters=self.of_masters)
        copies = {} if decode is None else decode(source_roots)
        twice = {name for name, boxes in copies.items() if boxes != self._stored.get(name)}
        self.targets = {name: target for name, target in self.targets.items() if all(feed.name in twice for feed in target.feeds)}
        self._stored = copies
        if not self.targets:
            raise NotHeardError("the checkpoint holds no weights beside the masters", where=str(source_roots[0]))

    def _decode(self, source_roots: tuple[Path, ...]) -> Stored:
        # Masters of Megatron lie elsewhere than its weights, so all of those are copies.
        return {} if self.of_masters else super()._decode(source_roots)
