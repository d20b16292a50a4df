"""What becomes of each save: the policy's rules, then what holds whatever the policy says.

Rules combine by "any of them keeps it". Above them, nothing goes that is incomplete, the newest, among the last two verified, or claimed by
somebody; and nothing goes at all while fewer than two saves are verified. Equal input gives an equal plan: the dry run is what is done.

A save that others of its stretch go for must be whole; so rules that choose one ask `is_whole`, which opens it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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


def plan_retention(evidence: RetentionEvidence, policy: RetentionPolicy, is_whole: WholeSaves) -> RetentionPlan:
    """Decide what becomes of each save.

    Args:
        evidence: what is known of the run.
        policy: what its owner wants.
        is_whole: opens a save that looks complete, and says whether it is.

    Returns:
        One decision per save.
    """
    whole = _Opened(is_whole)
    reasons: dict[str, list[str]] = {save.name: [] for save in evidence.saves}
    complete = [save for save in evidence.saves if save.is_complete]
    for save, because in (*_held(evidence, whole), *_ruled(complete, policy, evidence.pins, whole)):
        reasons[save.name].append(because)
    verified = [save for save in complete if save.name in evidence.verified and whole(save)]
    blocked = ""
    if len(verified) < MIN_VERIFIED:
        blocked = f"{len(verified)} that a green drill has read whole"
    thinned = {save.name for save in _stretches(complete, lambda save: save.step, policy.weights_only_every_steps, whole)}
    decisions = tuple(_decide(save, reasons[save.name], save.name in thinned, blocked) for save in evidence.saves)
    return RetentionPlan(evidence.root, decisions, evidence.unfinished, blocked)


class _Opened:
    # Remembers which saves were found whole: opening one takes a while.
    def __init__(self, is_whole: WholeSaves) -> None:
        self._is_whole, self._known = is_whole, dict[str, bool]()

    def __call__(self, save: SeenSave) -> bool:
        if save.name not in self._known:
            self._known[save.name] = self._is_whole(save)
        return self._known[save.name]


def _decide(save: SeenSave, because: list[str], is_thinned: bool, blocked: str) -> Decision:
    if save.is_half_thinned:
        return Decision(save.name, save.step, "thin", ("an interrupted run was thinning it",), save.nbytes, save.thinnable_nbytes)
    if because:
        return Decision(save.name, save.step, "keep", tuple(because), save.nbytes)
    if blocked:
        return Decision(save.name, save.step, "keep", (f"nothing goes before {MIN_VERIFIED} saves are verified: {blocked}",), save.nbytes)
    if is_thinned and save.thinnable:
        told = ("weights only, by weights_only_every_steps",)
        return Decision(save.name, save.step, "thin", told, save.nbytes, save.thinnable_nbytes)
    if is_thinned:
        told = ("weights_only_every_steps, but its weights and its training state lie in the same files",)
        return Decision(save.name, save.step, "keep", told, save.nbytes)
    return Decision(save.name, save.step, "go", ("no rule keeps it",), save.nbytes, save.nbytes)


def _held(evidence: RetentionEvidence, whole: WholeSaves) -> Kept:
    # What holds whatever the policy says.
    for save in evidence.saves:
        if not save.is_complete:
            yield save, f"not acted on: {save.cause}"
    yield from ((save, "the newest") for save in evidence.saves[-1:])
    newest = next((save for save in reversed(evidence.saves) if save.is_complete and whole(save)), None)
    if newest is not None:
        yield newest, "the newest complete one"
    verified = [save for save in evidence.saves if save.is_complete and save.name in evidence.verified and whole(save)]
    yield from ((save, "among the last two verified") for save in verified[-MIN_VERIFIED:])
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
    found = 0
    for save in reversed(complete):
        if found == policy.keep_last:
            return
        if whole(save):
            found += 1
            yield save


def _every_steps(complete: list[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> Iterator[SeenSave]:
    return _stretches(complete, lambda save: save.step, policy.every_steps, whole)


def _every_tokens(complete: list[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> Iterator[SeenSave]:
    return _stretches([save for save in complete if save.tokens], lambda save: save.tokens, policy.every_tokens, whole)


def _within_budget(complete: list[SeenSave], policy: RetentionPolicy, whole: WholeSaves) -> Iterator[SeenSave]:
    used = 0
    for save in reversed(complete):
        used += save.nbytes
        if used > policy.budget_nbytes:
            return
        yield save


# Field of the policy → the saves it keeps, where it is not 0
RULES: Mapping[str, Callable[[list[SeenSave], RetentionPolicy, WholeSaves], Iterator[SeenSave]]] = MappingProxyType(
    {"keep_last": _last, "every_steps": _every_steps, "every_tokens": _every_tokens, "budget_nbytes": _within_budget}
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
