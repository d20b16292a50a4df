"""What becomes of each save: the policy's rules, then what holds whatever the policy says.

Rules combine by "any of them keeps it". Above them, nothing goes that is incomplete, the newest, among the last two verified, or claimed by
somebody; and nothing goes at all while fewer than two saves are verified. Equal input gives an equal plan: the dry run is what is done.

A save that others of its stretch go for must be whole; so rules that choose one ask `is_whole`, which opens it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from types import MappingProxyType

from reports.spell import spell_bytes
from validators.retention.evidence import Claim, Decision, Pin, RetentionPlan, SeenSave
from validators.retention.policy import RetentionPolicy

MIN_VERIFIED = 2
WholeSaves = Callable[[SeenSave], bool]
Kept = Iterator[tuple[SeenSave, str]]


@dataclass(frozen=True, slots=True)
class RetentionEvidence:
    """What a plan is made of. `saves` are in numeric order of their steps; `verified` names those that a green drill read whole.

    `unfinished` are folders that an interrupted run left half-deleted.
    """

    root: str
    saves: tuple[SeenSave, ...]
    claims: tuple[Claim, ...] = ()
    pins: tuple[Pin, ...] = ()
    verified: frozenset[str] = field(default_factory=frozenset)
    unfinished: tuple[str, ...] = ()


def plan_retention(evidence: RetentionEvidence, policy: RetentionPolicy, is_whole: WholeSaves, has_weights: WholeSaves) -> RetentionPlan:
    """Decide what becomes of each save.

    Args:
        evidence: what is known of the run.
        policy: what its owner wants.
        is_whole: opens a save that looks complete, and says whether it is.
        has_weights: opens what thinning would leave of a save, and says whether all its weights are there.

    Returns:
        One decision per save.
    """
    whole = _Opened(is_whole)
    reasons: dict[str, list[str]] = {save.name: [] for save in evidence.saves}
    complete = [save for save in evidence.saves if save.is_complete]
    verified = _last_two(save for save in complete if save.name in evidence.verified and whole(save))
    newest = next((save for save in reversed(complete) if whole(save)), None)
    for save, because in (*_held(evidence, verified, newest), *_ruled(complete, policy, evidence.pins, whole)):
        reasons[save.name].append(because)
    thinned = {name: not reasons[name] and has_weights(save) for name, save in _to_thin(evidence.saves, policy, whole).items()}
    stay = {save.name: _stays(save, reasons[save.name], thinned) for save in evidence.saves}
    for save in _within_budget(evidence.saves, policy.budget_nbytes, stay):
        reasons[save.name].append(f"budget_nbytes: {spell_bytes(policy.budget_nbytes)}")
    blocked = f"{len(verified)} that a green drill has read whole" if len(verified) < MIN_VERIFIED else ""
    decisions = tuple(_decide(save, reasons[save.name], thinned.get(save.name), blocked) for save in evidence.saves)
    relied_on = dict.fromkeys(save.name for save in (*verified, *([newest] if newest else [])))
    names = tuple(save.name for save in verified)
    return RetentionPlan(
        evidence.root, _count_freed(decisions, evidence.saves), evidence.unfinished, blocked, tuple(relied_on), names, _backward(complete)
    )


class _Opened:
    # Remembers which saves were found whole: opening one takes a while.
    def __init__(self, is_whole: WholeSaves) -> None:
        self._is_whole, self._known = is_whole, dict[str, bool]()

    def __call__(self, save: SeenSave) -> bool:
        if save.name not in self._known:
            self._known[save.name] = self._is_whole(save)
        return self._known[save.name]


def _by_time(saves: Sequence[SeenSave]) -> list[SeenSave]:
    return sorted(saves, key=lambda save: (save.saved_at, save.step))


def _last_two(verified: Iterable[SeenSave]) -> list[SeenSave]:
    # By step, and by time: after a run went back, the last by step are of what it left.
    found = list(verified)
    return list({save.name: save for order in (_by_time(found), found) for save in order[-MIN_VERIFIED:]}.values())


def _stays(save: SeenSave, because: list[str], thinned: Mapping[str, bool]) -> int:
    # Bytes of a save that stay whatever the budget is.
    if because or (save.name in thinned and not thinned[save.name]):
        return save.nbytes
    return save.nbytes - save.thinnable_nbytes if save.name in thinned else 0


def _decide(save: SeenSave, because: list[str], has_weights: bool | None, blocked: str) -> Decision:
    # `has_weights` says of a save to be thinned whether what is left holds them; None of any other.
    if because:
        return Decision(save.name, save.step, "keep", tuple(because), save.nbytes)
    if blocked:
        return Decision(save.name, save.step, "keep", (f"nothing goes before {MIN_VERIFIED} saves are verified: {blocked}",), save.nbytes)
    if save.is_half_thinned:
        return Decision(save.name, save.step, "thin", ("an interrupted run was thinning it",), save.nbytes, save.thinnable_nbytes)
    if has_weights:
        told = ("weights only, by weights_only_every_steps",)
        return Decision(save.name, save.step, "thin", told, save.nbytes, save.thinnable_nbytes)
    if has_weights is not None:
        told = ("weights_only_every_steps, but its weights and its training state lie in the same files",)
        return Decision(save.name, save.step, "keep", told, save.nbytes, unthinnable=True)
    return Decision(save.name, save.step, "go", ("no rule keeps it",), save.nbytes, save.nbytes)


def _count_freed(decisions: tuple[Decision, ...], saves: tuple[SeenSave, ...]) -> tuple[Decision, ...]:
    # A file with several names gives its bytes back with the last of them, or never.
    going = {decision.name for decision in decisions if decision.action == "go"}
    left = {inode: names for save in saves for inode, names, _ in save.linked}
    if not left:
        return decisions
    counted = []
    for decision, save in zip(decisions, saves, strict=True):
        freed = decision.freed_nbytes
        for inode, _, nbytes in save.linked if save.name in going else ():
            left[inode] -= 1
            freed -= nbytes if left[inode] else 0
        counted.append(replace(decision, freed_nbytes=freed))
    return tuple(counted)


def _backward(complete: Sequence[SeenSave]) -> tuple[str, ...]:
    found, latest = [], 0.0
    for save in complete:
        if save.saved_at < latest:
            found.append(save.name)
        latest = max(latest, save.saved_at)
    return tuple(found)


def _held(evidence: RetentionEvidence, verified: list[SeenSave], newest: SeenSave | None) -> Kept:
    # What holds whatever the policy says.
    for save in evidence.saves:
        if not save.is_complete and not save.is_half_thinned:
            yield save, save.cause if save.is_thinned else f"not acted on: {save.cause}"
    yield from ((save, "the newest") for save in evidence.saves[-1:])
    yield from ((save, "the newest complete one") for save in [newest] if save is not None)
    yield from ((save, "the last one written") for save in _by_time(evidence.saves)[-1:] if save != evidence.saves[-1])
    yield from ((save, "among the last two verified") for save in verified)
    named = {save.name: save for save in evidence.saves}
    yield from ((named[claim.name], claim.because) for claim in evidence.claims if claim.name in named)


def _ruled(complete: list[SeenSave], policy: RetentionPolicy, pins: Sequence[Pin], whole: WholeSaves) -> Kept:
    for name, rule in RULES.items():
        if getattr(policy, name):
            yield from ((save, f"{name}: {getattr(policy, name):g}") for save in rule(complete, policy, whole))
    if policy.every_tokens:  # it may be the only one of its stretch
        yield from ((save, "every_tokens, and nobody tells its tokens") for save in complete if not save.tokens)
    milestones = [Pin(step, step, f"milestone {step}") for step in policy.milestones]
    pinned = [Pin(row.step, row.step, f"pinned at step {row.step}: {row.because}") for row in policy.pins]
    for pin in (*milestones, *pinned, *pins):
        yield from ((save, pin.because) for save in _around(complete, pin, whole))


def _last(complete: list[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> Iterator[SeenSave]:
    # By step, and by time: a run that went back writes lower steps than those it left behind.
    chosen = (islice(filter(whole, reversed(order)), policy.keep_last) for order in (complete, _by_time(complete)))
    yield from {save.name: save for saves in chosen for save in saves}.values()


def _every_steps(complete: list[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> Iterator[SeenSave]:
    return _stretches(complete, lambda save: save.step, policy.every_steps, whole)


def _every_tokens(complete: list[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> Iterator[SeenSave]:
    return _stretches([save for save in complete if save.tokens], lambda save: save.tokens, policy.every_tokens, whole)


def _within_budget(saves: Sequence[SeenSave], budget_nbytes: int, stay: Mapping[str, int]) -> Iterator[SeenSave]:
    # The newest of those that nothing else keeps whole, as far as they fit beside what stays anyway.
    used = sum(stay.values())
    for save in reversed(saves):
        if save.is_complete and stay[save.name] < save.nbytes:
            used += save.nbytes - stay[save.name]
            if used > budget_nbytes:
                return
            yield save


# Field of the policy → the saves it keeps, where it is not 0
RULES: Mapping[str, Callable[[list[SeenSave], RetentionPolicy, WholeSaves], Iterator[SeenSave]]] = MappingProxyType(
    {"keep_last": _last, "every_steps": _every_steps, "every_tokens": _every_tokens}
)


def _stretches(saves: Sequence[SeenSave], count: Callable[[SeenSave], int], length: int, whole: WholeSaves) -> Iterator[SeenSave]:
    # The first whole save of each stretch; one that is alone in its stretch need not be opened: none goes for it.
    if not length:
        return
    for _, group in groupby(saves, lambda save: count(save) // length):
        alike = list(group)
        chosen = alike[0] if len(alike) == 1 else next((save for save in alike if whole(save)), None)
        if chosen is not None:
            yield chosen


def _to_thin(saves: Sequence[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> dict[str, SeenSave]:
    # Of each stretch one; where an earlier run has thinned one, that is it.
    if not policy.weights_only_every_steps:
        return {}
    kept = [save for save in saves if save.is_complete or save.is_thinned]
    stretches = (list(group) for _, group in groupby(kept, lambda save: save.step // policy.weights_only_every_steps))
    fresh = (alike for alike in stretches if not any(save.is_thinned for save in alike))
    chosen = (next((save for save in alike if whole(save)), None) for alike in fresh)
    return {save.name: save for save in chosen if save is not None}


def _around(complete: list[SeenSave], pin: Pin, whole: WholeSaves) -> Iterator[SeenSave]:
    before = next((save for save in reversed(complete) if save.step <= pin.before and whole(save)), None)
    after = next((save for save in complete if save.step >= pin.after and whole(save)), None)
    yield from {save.name: save for save in (before, after) if save is not None}.values()


def spell_excess(plan: RetentionPlan, policy: RetentionPolicy) -> str:
    """Return what is kept, where it exceeds the budget.

    Args:
        plan: of the run.
        policy: with its budget.

    Returns:
        Its size as text; "" when it fits, or there is no budget.
    """
    kept = sum(decision.nbytes - decision.freed_nbytes for decision in plan.decisions)
    return spell_bytes(kept) if policy.budget_nbytes and kept > policy.budget_nbytes else ""
