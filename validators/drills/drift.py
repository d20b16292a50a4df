"""D1: what changed since the last drill of the same run: names, the optimizer's spelling, the order of parameters, frameworks."""

import re
from collections.abc import Iterator, Mapping

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import DrillEvidence, PastDrill
from validators.drills.facts import StateFacts

_LISTED = re.compile(r"param_groups\.(\d+)\.params\.(\d+)$")
_VERSION = re.compile(r"(?:^|[._])version$")
_NESTED = re.compile(r"param_groups\.\d+\.")


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Hold the newest save against what the last drill saw.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings; nothing changed in a sound run.
    """
    if evidence.newest is None:
        return Skip("no complete save")
    known = [past for past in evidence.history if past.keys]
    if not known:
        return Skip("the first drill of this run")
    past, facts = known[-1], evidence.newest.facts
    spelling = spelling_of(facts)
    findings = (
        *_spelling(past, spelling),
        *_keys(past, list_keys(facts)),
        *_order(past, list_order(facts)),
        *_versions(past, versions_of(facts, evidence.versions)),
    )
    return Outcome(findings, len(facts.entries), {"since": past.finished, "keys then": len(past.keys), "keys now": len(list_keys(facts))})


def list_keys(facts: StateFacts) -> tuple[str, ...]:
    """Return the names that must stay the same from save to save.

    Args:
        facts: what a save says.

    Returns:
        Keys of tensors, and of objects with rank numbers left out; sorted.
    """
    return tuple(sorted(key for key, entry in facts.entries.items() if entry.role != "object"))


def list_order(facts: StateFacts) -> tuple[str, ...]:
    """Return the parameters in the optimizer's order, which integer ids count by.

    Args:
        facts: what a save says.

    Returns:
        Names, group by group; empty where the save does not list them.
    """
    found = {tuple(map(int, match.groups())): str(facts.values[match.string]) for match in map(_LISTED.search, facts.values) if match}
    return tuple(found[place] for place in sorted(found))


def versions_of(facts: StateFacts, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what took part in writing and in reading a save.

    Args:
        facts: what the save says.
        environment: versions of the reader's packages.

    Returns:
        Versions by name; those the save records begin with "writer's".
    """
    recorded = {f"writer's {key}": str(value) for key, value in facts.values.items() if _VERSION.search(key)}
    return {**environment, **recorded}


def spelling_of(facts: StateFacts) -> str:
    """Return how the optimizer's groups are spelled.

    Args:
        facts: what a save says.

    Returns:
        "nested" (by number), "flattened" (by parameter), or "" without any.
    """
    groups = [name for name in facts.names() if "param_groups." in name]
    if not groups:
        return ""
    return "nested" if any(_NESTED.search(name) for name in groups) else "flattened"


def _keys(past: PastDrill, now: tuple[str, ...]) -> Iterator[Finding]:
    # Names of the model must stay; an optimizer's entries also come with parameters that are unfrozen, or another optimizer.
    gone, new = set(past.keys) - set(now), set(now) - set(past.keys)
    if gone or new:
        code = "drift.state-keys" if all("/" in key for key in gone | new) else "drift.keys"
        found = f"gone: {name_some(gone, 3)}; new: {name_some(new, 3)}"
        yield finding(code, f"since {past.run_id}", expected=f"the {len(past.keys)} names of the last drill", found=found)


def _spelling(past: PastDrill, now: str) -> Iterator[Finding]:
    if past.spelling and now and past.spelling != now:
        yield finding("drift.flattening", f"since {past.run_id}", expected=past.spelling, found=now)


def _order(past: PastDrill, now: tuple[str, ...]) -> Iterator[Finding]:
    if past.parameter_order and now and past.parameter_order != now and set(past.parameter_order) == set(now):
        first = next(name for name, other in zip(past.parameter_order, now, strict=True) if name != other)
        yield finding(
            "drift.parameter-order", f"since {past.run_id}", expected=f"{first} where it was", found="another order of the same names"
        )


def _versions(past: PastDrill, now: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(past.versions.keys() & now.keys()):
        if past.versions[name] != now[name]:
            yield finding("drift.versions", name, expected=past.versions[name], found=now[name])


CHECK = DrillCheck("drift", "D1", examine)
