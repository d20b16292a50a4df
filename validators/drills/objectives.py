"""D1: recovery time, work lost, storage and the save interval, held against what the owner wants."""

from collections.abc import Iterator

from reports.codes import finding
from reports.model import Finding, Measure
from reports.spell import spell_bytes, spell_seconds
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import DrillEvidence
from validators.drills.goals import Goals, Numbers, save_share, young_interval

NOT_KNOWN = "not known"
INTERVAL_FACTOR = 3.0  # an interval this far from Young's loses a third more than it need


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Judge the numbers.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings for what misses its target; every number is a measure, every target a limit.
    """
    if evidence.newest is None:
        return Skip("no complete save")
    goals, numbers = evidence.goals, evidence.numbers
    findings = (*_export(evidence), *_targets(goals, numbers), *_storage(goals, numbers), *_interval(goals, numbers))
    return Outcome(findings, 1, _measures(goals, numbers), _limits(goals))


def _targets(goals: Goals, numbers: Numbers) -> Iterator[Finding]:
    for code, found, target, spell in (
        ("objectives.rto", numbers.rto_seconds, goals.rto_seconds, spell_seconds),
        ("objectives.rpo", numbers.rpo_seconds, goals.rpo_seconds, spell_seconds),
        ("objectives.rpo", numbers.rpo_steps, goals.rpo_steps, lambda n: f"{n:g} steps"),
        ("objectives.rpo", numbers.rpo_tokens, goals.rpo_tokens, lambda n: f"{n:g} tokens"),
    ):
        if target and found is None:
            yield finding("objectives.unmeasured", "newest complete save", expected=f"at most {spell(target)}", found=NOT_KNOWN)
        elif target and found is not None and found > target:
            yield finding(code, "newest complete save", expected=f"at most {spell(target)}", found=spell(found))


def _export(evidence: DrillEvidence) -> Iterator[Finding]:
    schedule = evidence.goals.declared.export_schedule
    if schedule and not evidence.exported:
        yield finding(
            "objectives.export-unverified", "exports", expected=f"a green one, as scheduled: {schedule}", found="none of this run"
        )


def _storage(goals: Goals, numbers: Numbers) -> Iterator[Finding]:
    budget = goals.declared.budget_nbytes
    if budget and numbers.used_nbytes > budget:
        yield finding("objectives.budget", "saves", expected=f"at most {spell_bytes(budget)}", found=spell_bytes(numbers.used_nbytes))
    needed = goals.spare_factor * numbers.nbytes
    if numbers.free_nbytes < needed:
        yield finding("objectives.free-space", "disk", expected=f"{spell_bytes(needed)} free", found=spell_bytes(numbers.free_nbytes))


def _interval(goals: Goals, numbers: Numbers) -> Iterator[Finding]:
    share, interval = save_share(goals, numbers), goals.declared.save_interval_seconds or numbers.interval_seconds
    if share > goals.max_save_share:
        yield finding("objectives.save-blocks", "saves", expected=f"at most {goals.max_save_share:.1%} of the time", found=f"{share:.1%}")
    best = young_interval(goals.mtbf_seconds, goals.save_seconds)
    if best and interval and not best / INTERVAL_FACTOR <= interval <= best * INTERVAL_FACTOR:
        yield finding(
            "objectives.interval", "saves", expected=f"about every {spell_seconds(best)}", found=f"every {spell_seconds(interval)}"
        )


def _measures(goals: Goals, numbers: Numbers) -> dict[str, Measure]:
    measures: dict[str, Measure] = {f"rto {phase}, s": seconds for phase, seconds in numbers.rto.items()}
    known = {
        "rto, s": numbers.rto_seconds,
        "rpo, s": numbers.rpo_seconds,
        "rpo, steps": numbers.rpo_steps,
        "rpo, tokens": numbers.rpo_tokens,
        "rpo from": numbers.rpo_basis,
        "bytes": numbers.nbytes,
        "read rate, B/s": numbers.bytes_per_second,
        "saves, B": numbers.used_nbytes,
        "free, B": numbers.free_nbytes,
        "interval, s": numbers.interval_seconds or None,
    }
    measures |= {name: NOT_KNOWN if value is None else value for name, value in known.items()}
    best, share = young_interval(goals.mtbf_seconds, goals.save_seconds), save_share(goals, numbers)
    if best:
        measures["Young's interval, s"] = best
    if share:
        measures["time in saves"] = share
        measures["tokens a day spent in saves"] = share * 86400 * goals.tokens_per_second
    return measures


def _limits(goals: Goals) -> dict[str, Measure]:
    wanted: dict[str, Measure] = {"rto, s": goals.rto_seconds, "rpo, s": goals.rpo_seconds, "rpo, steps": goals.rpo_steps}
    wanted |= {"rpo, tokens": goals.rpo_tokens, "saves, B": goals.declared.budget_nbytes}
    return {name: value for name, value in wanted.items() if value} | (
        {"time in saves": goals.max_save_share} if goals.save_seconds else {}
    )


CHECK = DrillCheck("objectives", "D1", examine)
