"""D3: training that continues from the save is the training that was logged: state, rates, batches, random numbers, losses.

At as many ranks as had saved, on the same kind of machine, every number must be equal bit for bit. The first loss alone proves little: lost
moments, a restarted schedule and wrong step counts leave it as it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding, Measure
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import Difference, DrillEvidence, Resumed, Step

# dtype → relative difference of a loss that another CPU's order of summation makes over some steps; the weights' own rounding, 2^-24 and
# 2^-8, times what a handful of layers and steps add up to
ROUNDING: Mapping[str, float] = MappingProxyType({"F64": 1e-12, "F32": 1e-5, "F16": 2e-3, "BF16": 1e-2})
_MOMENTS = ("first moment", "second moment", "moment")
Ranks = Mapping[int, Mapping[int, Step]]  # rank → step → what was logged


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Judge a resume.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings; how many values of the state and how many steps were compared.
    """
    resumed = evidence.resumed
    if resumed is None:
        return Skip(evidence.reasons.get("resume", "no --resume was given"))
    if resumed.refusal:
        refused = finding("resume.refused", resumed.save, expected="training continues", found=resumed.refusal)
        return Outcome((*_world(resumed), refused), 1)
    logged = _by_rank(evidence.log)
    pairs = [(step, logged[step.rank][step.step]) for step in resumed.steps if step.step in logged.get(step.rank, {})]
    others = (*_state(resumed), *_series(resumed, logged))
    findings = (*_world(resumed), *others, *_losses(resumed, pairs, 0.0 if others else _rounding(evidence)))
    measured: dict[str, Measure] = {
        "state values compared": resumed.compared,
        "steps taken": len(resumed.steps),
        "steps compared with the log": len(pairs),
        "ranks": resumed.world_size,
        "first step, s": resumed.first_step_seconds,
        "largest difference of a loss": max((abs((a.loss or 0) - (b.loss or 0)) for a, b in pairs), default=0.0),
    }
    return Outcome(findings, resumed.compared + len(pairs), measured)


def _by_rank(log: Sequence[Step]) -> Ranks:
    ranks: dict[int, dict[int, Step]] = {}
    for step in log:
        ranks.setdefault(step.rank, {})[step.step] = step
    return ranks


def _world(resumed: Resumed) -> Iterator[Finding]:
    if not resumed.same_world:
        found = f"resumed by {resumed.world_size}"
        yield finding("resume.world-changed", resumed.save, expected=f"{resumed.saved_by} ranks, as had saved", found=found)


def _state(resumed: Resumed) -> Iterator[Finding]:
    parts: dict[str, list[Difference]] = {}
    for difference in resumed.differences:
        parts.setdefault(difference.part, []).append(difference)
    moments = [d for part in _MOMENTS for d in parts.get(part, ())]
    lost = {part: bool(parts.get(part)) and all(d.kind in ("zero", "missing") for d in parts[part]) for part in _MOMENTS}
    if moments:
        code = _moments_code(moments, lost)
        yield _tell(code, resumed, moments)
    for part, code in (
        ("model", "resume.weights"),
        ("step", "resume.optimizer-step"),
        ("scheduler", "resume.schedule"),
        ("counter", "resume.counter"),
        ("rng", "resume.random-numbers"),
    ):
        if parts.get(part):
            yield _tell(code, resumed, parts[part])


def _moments_code(moments: list[Difference], lost: Mapping[str, bool]) -> str:
    kinds = {difference.kind for difference in moments}
    if lost["first moment"] and lost["second moment"]:
        return "resume.optimizer-lost"
    if lost["first moment"] and all(difference.part == "first moment" for difference in moments):
        return "resume.first-moment-lost"
    if "moved" in kinds:
        return "resume.moments-misaligned"
    return "resume.moments-rounded" if kinds == {"rounded"} else "resume.moments"


def _tell(code: str, resumed: Resumed, differences: Sequence[Difference]) -> Finding:
    first = differences[0]
    where = f"{resumed.save}: {name_some((d.key for d in differences), 3)}"
    return finding(code, where, expected=f"as saved, {len({d.key for d in differences})} values", found=first.found)


@dataclass(frozen=True, slots=True)
class _Series:
    # Something logged every step that must go on where it was: how it is read, and the code per way it can be elsewhere.
    name: str
    read: Callable[[Step], object]
    restarted: str
    behind: str
    ahead: str
    other: str


SERIES: tuple[_Series, ...] = (
    _Series("lr", lambda step: step.lr, "resume.lr-restarted", "resume.lr-shifted", "resume.lr-shifted", "resume.lr"),
    _Series(
        "batch", lambda step: step.batch, "resume.data-restarted", "resume.data-repeated", "resume.data-skipped", "resume.data-reordered"
    ),
    _Series("rng", lambda step: step.rng, *["resume.random-numbers"] * 4),
)


def _series(resumed: Resumed, logged: Ranks) -> Iterator[Finding]:
    for series in SERIES:
        for rank, steps in _by_rank(resumed.steps).items():
            found = _judge_series(series, resumed.step, steps, logged.get(rank, {}))
            if found is not None:
                code, told = found
                yield finding(
                    code, f"{resumed.save}, rank {rank}: {series.name}", expected=f"as logged from step {resumed.step + 1}", found=told
                )


def _judge_series(series: _Series, saved: int, steps: Mapping[int, Step], log: Mapping[int, Step]) -> tuple[str, str] | None:
    taken = {number: series.read(step) for number, step in steps.items() if series.read(step)}
    wanted = {number: series.read(step) for number, step in log.items() if series.read(step)}
    common = sorted(taken.keys() & wanted.keys())
    if not common or all(taken[number] == wanted[number] for number in common):
        return None
    shift = _find_shift(taken, wanted, saved)
    if shift == -saved:
        return series.restarted, "as logged from the first step"
    if shift == saved and series.name == "lr":
        return "resume.lr-doubled", f"as logged from step {2 * saved + 1}"
    if shift is not None:
        return (series.behind if shift < 0 else series.ahead), f"as logged {abs(shift)} steps {'before' if shift < 0 else 'after'}"
    return series.other, f"{_spell(taken[common[0]])} where {_spell(wanted[common[0]])} was logged"


def _find_shift(taken: Mapping[int, object], wanted: Mapping[int, object], saved: int) -> int | None:
    # How many steps away the log has these values, the nearest first; one that is held constant fits anywhere and tells nothing.
    if len(set(wanted.values())) < 2:
        return None
    shifts = sorted((n - min(taken) for n in wanted), key=lambda n: (n != -saved, n != saved, abs(n)))
    for shift in shifts:
        pairs = [(value, wanted[number + shift]) for number, value in taken.items() if number + shift in wanted]
        if shift and len(pairs) >= min(3, len(taken)) and all(one == other for one, other in pairs):
            return shift
    return None


def _spell(value: object) -> str:
    return str(value)[:40]


def _rounding(evidence: DrillEvidence) -> float:
    # Of the coarsest dtype that the model computes in.
    dtypes = {entry.dtype for entry in evidence.newest.facts.of_role("model")} if evidence.newest else set()
    return max((ROUNDING[dtype] for dtype in dtypes & ROUNDING.keys()), default=ROUNDING["F32"])


def _losses(resumed: Resumed, pairs: Sequence[tuple[Step, Step]], rounding: float) -> Iterator[Finding]:
    # Where state, rates, batches and random numbers are all as logged, a loss may differ by the arithmetic of another machine.
    if not resumed.same_world:
        return
    odd = [(got, logged) for got, logged in pairs if logged.loss is not None and got.loss != logged.loss]
    if odd:
        got, logged = odd[0]
        is_rounding = all(abs((a.loss or 0.0) - (b.loss or 0.0)) <= rounding * abs(b.loss or 0.0) for a, b in odd)
        where = f"{resumed.save}, step {got.step}, rank {got.rank}"
        code = "resume.loss-rounded" if is_rounding else "resume.loss"
        yield finding(code, where, expected=f"{logged.loss!r}, {len(pairs)} compared", found=f"{got.loss!r}, {len(odd)} differ")


CHECK = DrillCheck("resume", "D3", examine)
