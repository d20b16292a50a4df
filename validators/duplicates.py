"""No layer, expert or matrix is a copy of its sibling: what a rank that is read twice, or a wrong layer offset, leaves behind.

A *unit* is all that a name's beginning up to an index covers: `model.layers.3`, `model.layers.3.mlp.experts.7`. Units are judged first,
then the matrices that are in no copied unit. Vectors are left out: norms and biases start alike, and barely trained ones stay so.

A matrix that is alike in all of its role (a table of angles, a state-space decay) is shared by design, and only said. What an exact
comparison finds in the source too is said, not held against the release.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.codes import finding
from reports.model import Finding, Measure
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.measured import compared_rows, measured_rows
from validators.policy import NEAR_DISTANCE, ROUNDING_DISTANCE
from validators.quantization import read_quantization
from validators.sampled import read_samples
from validators.siblings import Link, Matrix, index_places, is_alike, link_copies, telling_matrices


@dataclass(frozen=True, slots=True)
class _Copy:
    """A unit, or one matrix, that is a copy: `names` are its matrices and `originals` theirs; `distance` is the greatest."""

    where: str
    original: str
    names: tuple[str, ...]
    originals: tuple[str, ...]
    distance: float


def examine(evidence: Evidence) -> Outcome:
    """Hold every matrix against its siblings in other layers and experts.

    Args:
        evidence: a TensorTable; a ValueTable where there is one.

    Returns:
        Findings, and the number of tensors looked at.
    """
    assert evidence.tensors is not None
    aside = read_quantization(evidence.release).aside
    rows = [row for row in measured_rows(evidence.tensors) if row.name not in aside]
    matrices = telling_matrices(rows, read_samples(evidence.tensors))
    links = _by_name(link_copies(matrices))
    units = _copied_units(matrices, links)
    inside = {name for unit in units for name in unit.names}
    alone = {name: min(held, key=lambda link: link.distance) for name, held in links.items() if name not in inside}
    shared = _shared_roles(matrices, alone)
    equal = {row.name for row in compared_rows(evidence.values) if row.differing == 0}
    proven = frozenset(matrix.name for matrix in matrices if matrix.row.name in equal)
    findings = [
        *(_judge(unit, proven, exact="duplicates.unit", rounded="duplicates.near-unit") for unit in units),
        *(
            _judge(_Copy(name, link.other, (name,), (link.other,), link.distance), proven, exact="duplicates.matrix", rounded="")
            for name, link in alone.items()
            if all(name not in names for names in shared.values())
        ),
        *(_say_shared(role, names) for role, names in shared.items()),
    ]
    measured: dict[str, Measure] = {"matrices": len(matrices), "copied_units": len(units), "copied_matrices": len(alone)}
    return Outcome(tuple(findings), len(rows), measured, {"copied_units": 0})


def _by_name(links: Sequence[Link]) -> Mapping[str, list[Link]]:
    held: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        held[link.name].append(link)
    return held


def _copied_units(matrices: Sequence[Matrix], links: Mapping[str, Sequence[Link]]) -> list[_Copy]:
    units: dict[tuple[int, str], list[str]] = defaultdict(list)
    for matrix in matrices:
        for place in index_places(matrix.name):
            units[place, ".".join(matrix.name.split(".")[: place + 1])].append(matrix.name)
    copied: list[_Copy] = []
    inside: set[str] = set()
    for (_, unit), names in sorted(units.items(), key=lambda entry: entry[0][0]):  # layers before their experts
        if len(names) > 1 and not inside.intersection(names) and (copy := _copy_of(unit, names, links)):
            copied.append(copy)
            inside.update(names)
    return copied


def _copy_of(unit: str, names: Sequence[str], links: Mapping[str, Sequence[Link]]) -> _Copy | None:
    # The unit whose matrices, name for name, are the originals of all of this one's.
    found: dict[str, list[Link]] = defaultdict(list)
    for name in names:
        rest = name.removeprefix(unit)
        for link in links.get(name, ()):
            if link.other.endswith(rest):
                found[link.other.removesuffix(rest)].append(link)
    whole = [(original, held) for original, held in found.items() if len(held) == len(names)]
    if not whole:
        return None
    original, held = min(whole, key=lambda entry: max(link.distance for link in entry[1]))
    return _Copy(unit, original, tuple(names), tuple(link.other for link in held), max(link.distance for link in held))


def _shared_roles(matrices: Sequence[Matrix], alone: Mapping[str, Link]) -> Mapping[str, list[str]]:
    groups: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        groups[matrix.role].append(matrix)
    roles = dict.fromkeys(matrix.role for matrix in matrices if matrix.name in alone)
    return {role: [matrix.name for matrix in groups[role]] for role in roles if is_alike(groups[role])}


def _judge(copy: _Copy, proven: frozenset[str], *, exact: str, rounded: str) -> Finding:
    # `rounded` is the code of what differs by rounding alone, "" for none.
    code = exact if copy.distance == 0 else rounded if rounded and copy.distance < ROUNDING_DISTANCE else "duplicates.near"
    if proven.issuperset(copy.names) and proven.issuperset(copy.originals):
        code = "duplicates.source"
    how = "those" if copy.distance == 0 else f"{copy.distance:.2g} from those"
    expected = "values of its own" if copy.distance == 0 else f"at least {NEAR_DISTANCE:g} from any other"
    return finding(code, copy.where, expected=expected, found=f"{how} of {copy.original}")


def _say_shared(role: str, names: Sequence[str]) -> Finding:
    return finding("duplicates.shared", role, expected="values of its own in each layer", found=f"about the same in all {len(names)}")


CHECK = Check("duplicates", ("bytes",), examine)
