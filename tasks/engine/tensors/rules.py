"""Name mappings as tables: a *naming* is a tuple of rules, and every source tensor must be taken by exactly one of them.

`{layer}` and `{expert}` (global expert id) are the only placeholders; each stands for one whole dotted component that is a number.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tasks.engine.tensors.ops import Op, Same

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PLACEHOLDER = re.compile(r"\{(layer|expert)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One source name becomes one or more targets through an op."""

    source: str
    targets: tuple[str, ...]
    op: Op = field(default_factory=Same)


@dataclass(frozen=True, slots=True)
class Drop:
    """A source that is left out on purpose, and why."""

    source: str
    because: str


@dataclass(frozen=True, slots=True)
class Match:
    """A rule or drop that takes a source, with the source's numbers filled in to `targets`."""

    row: Rule | Drop
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Naming:
    """One way a family's tensors are called in checkpoints. `name` appears in plans and reports."""

    name: str
    rows: tuple[Rule | Drop, ...]

    @cached_property
    def _by_template(self) -> Mapping[str, Rule | Drop]:
        return {_PLACEHOLDER.sub("#", row.source): row for row in self.rows}

    def match(self, source: str) -> Match | None:
        """Return what takes `source`, or None.

        Args:
            source: a tensor's FQN.

        Returns:
            The row, and its targets with {layer} (and {expert}, where the source names it) filled in.
        """
        row = self._by_template.get(_NUMBER.sub("#", source)) or self._by_template.get(source)
        if row is None:
            return None
        if isinstance(row, Drop):
            return Match(row, ())
        keys = _PLACEHOLDER.findall(row.source)
        numbers = dict(zip(keys, _NUMBER.findall(source), strict=False)) if keys else {}
        return Match(row, tuple(_PLACEHOLDER.sub(lambda m: numbers.get(m[1], m[0]), target) for target in row.targets))

    def unmatched(self, sources: Iterable[str]) -> list[str]:
        """Return the sources no row takes.

        Args:
            sources: tensor names.

        Returns:
            Those without a row, in their order.
        """
        return [name for name in sources if self.match(name) is None]


def published(targets: Iterable[str]) -> Iterator[Rule]:
    """Yield the rules of a naming that calls tensors as they are published.

    Args:
        targets: published names, placeholders in.

    Yields:
        One rule per name.
    """
    for target in targets:
        yield Rule(target, (target,))


def rename(rows: Sequence[tuple[str, str]]) -> tuple[Rule, ...]:
    """Return rules for plain renames.

    Args:
        rows: (source, target) pairs.

    Returns:
        One rule per pair.
    """
    return tuple(Rule(source, (target,)) for source, target in rows)
