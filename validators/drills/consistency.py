"""D2: the components of a save belong to one moment of one run, and to each other."""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding, Measure
from validators.check import Outcome
from validators.drills.check import DrillCheck, Skip
from validators.drills.evidence import Drilled, DrillEvidence, Step
from validators.drills.facts import Entry, Scalar, StateFacts

_TRAIN_STEPS = (
    "train_state.step",
    "train_state.global_step",
    "trainer.global_step",
    "trainer_state.json.global_step",
    "global_step",
    "iteration",
)
_SCHEDULER_STEPS = ("last_epoch",)  # Megatron's num_steps counts samples
_TOKENS = ("ntokens_seen", "tokens_seen", "consumed_tokens")
_TOKENS_OF_A_RANK = "train_state.ntokens_seen"
_OPTIONAL_TOKENS = "num_input_tokens_seen"  # of Trainer: 0 unless include_num_input_tokens_seen asks for it
_SAMPLES = ("args.consumed_train_samples", "args.seq_length")
# What every rank saves for itself → its number in a key
RANKED: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "data position": re.compile(r"(?:^|\.)dataloader\.dp_rank_(\d+)(?:\.|$)"),
        "random numbers": re.compile(r"^(?:rng\.rank_|rng_state_|random_states_)(\d+)(?:\.|$)"),
    }
)
# Slots of tensors that have their parameter's shape
WHOLE_SLOTS = frozenset({"master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_NARROW = frozenset({"BF16", "F16", "F8_E4M3", "F8_E5M2"})


def examine(evidence: DrillEvidence) -> Outcome | Skip:
    """Judge each chosen save against itself.

    Args:
        evidence: what the drill saw.

    Returns:
        Findings, and the newest save's counters as measures.
    """
    if evidence.newest is None:
        return Skip("no complete save")
    findings = [
        f for drilled in evidence.sound for f in (*_ranks(drilled), *_steps(drilled), *_tokens(drilled, evidence), *_moments(drilled))
    ]
    examined = sum(len(d.facts.entries) for d in evidence.sound)
    return Outcome(tuple(findings), examined, _counters(evidence.newest.facts))


def train_step(values: Mapping[str, Scalar]) -> int | None:
    """Return the step that the trainer's own counter tells.

    Args:
        values: the plain values of a save.

    Returns:
        The counter, else None.
    """
    found = [value for key in _TRAIN_STEPS for value in _ending(values, key)]
    return found[0] if found else None


def count_tokens(values: Mapping[str, Scalar]) -> int | None:
    """Return the tokens that the trainer's own counter tells.

    Args:
        values: the plain values of a save.

    Returns:
        The counter; Megatron counts samples, of equal length; else None.
    """
    counted = next((value for name in _TOKENS for value in _ending(values, name)), None)
    if counted is not None:
        return counted
    samples = [value for name in _SAMPLES for value in _ending(values, name)]
    if len(samples) == len(_SAMPLES):
        return prod(samples)
    return next((value for value in _ending(values, _OPTIONAL_TOKENS) if value), None)


def counts_by_rank(values: Mapping[str, Scalar]) -> bool:
    """Return whether the tokens that a save counts may be those of one rank.

    torchtitan adds to `ntokens_seen` what the rank's own data loader gave (`labels.numel()`) and saves the number as it is; what it logs is
    the sum over the mesh whose loss it averages, data times context parallel. Others count the whole run under the same name.

    Args:
        values: the plain values of a save.

    Returns:
        Whether its counter is of torchtitan's name.

    Source: pytorch/torchtitan, torchtitan/train.py (2025; later trainer.py): batch_generator, train_step and state_dict of Trainer.
    """
    return bool(_ending(values, _TOKENS_OF_A_RANK))


def ranks_counted(tokens: int, total: int, ranks: int) -> int:
    """Return how many ranks of `tokens` each make a total.

    Args:
        tokens: what one rank counted.
        total: of the run.
        ranks: how many ranks there were.

    Returns:
        A number that divides `ranks`, 1 among them; 0 where none does it.
    """
    times, rest = divmod(total, tokens) if tokens else (0, 0)
    return times if times and not rest and ranks % times == 0 else 0


def known_step(drilled: Drilled) -> int:
    """Return at which step a save was made, as the log counts.

    Args:
        drilled: the save.

    Returns:
        The trainer's own counter, else the folder's number, else 0.
    """
    trained = train_step(drilled.facts.values)
    return trained if trained is not None else drilled.save.step or 0


def _ending(values: Mapping[str, Scalar], name: str) -> list[int]:
    found = [value for key, value in values.items() if key == name or key.endswith(f".{name}")]
    return [int(value) for value in found if _is_count(value)]


def _is_count(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()


def _optimizer_steps(facts: StateFacts) -> list[int]:
    return [int(value) for key, value in facts.values.items() if key.startswith("step/") and _is_count(value)]


def _scheduler_steps(facts: StateFacts) -> list[int]:
    return [value for name in _SCHEDULER_STEPS for value in _ending(facts.values, name)]


def _counters(facts: StateFacts) -> dict[str, Measure]:
    counters = {
        "train step": train_step(facts.values),
        "optimizer step": max(_optimizer_steps(facts), default=None),
        "scheduler step": max(_scheduler_steps(facts), default=None),
        "folder's step": facts.step,
        "tokens": count_tokens(facts.values),
    }
    return {name: value for name, value in counters.items() if value is not None}


def _steps(drilled: Drilled) -> Iterator[Finding]:
    facts, where = drilled.facts, drilled.save.name
    trained = train_step(facts.values)
    optimizer, scheduler = _optimizer_steps(facts), _scheduler_steps(facts)
    if trained and optimizer and max(optimizer) == 0:
        yield finding("consistency.optimizer-restarted", where, expected=f"step {trained}", found="step 0 of every parameter")
    elif trained is not None and optimizer and max(optimizer) != trained:
        yield finding("consistency.optimizer-step", where, expected=f"step {trained}", found=f"step {max(optimizer)}")
    if trained and scheduler and max(scheduler) == 0:
        yield finding("consistency.scheduler-restarted", where, expected=f"step {trained}", found="step 0")
    elif trained is not None and scheduler and trained not in scheduler:
        yield finding("consistency.scheduler-step", where, expected=f"step {trained}", found=f"step {max(scheduler)}")
    if trained is not None and facts.step is not None and trained != facts.step:
        yield finding(
            "consistency.folder-step", where, expected=f"step {trained}, as its counter says", found=f"step {facts.step} in its name"
        )


def _ranks(drilled: Drilled) -> Iterator[Finding]:
    # State that every rank saves under its own number: none between may lack, nor fewer be there than the save says.
    facts, where = drilled.facts, drilled.save.name
    recorded = next(iter(_ending(facts.values, "dataloader.world_size")), 0)
    for name, pattern in RANKED.items():
        found = {int(match[1]) for match in map(pattern.search, facts.names()) if match}
        world = max((rank + 1 for rank in found), default=0)
        if found and name == "data position":
            world = max(world, recorded)
        lost = sorted(set(range(world)) - found)
        if lost:
            told = f"none of rank {', '.join(map(str, lost[:8]))}"
            yield finding("consistency.ranks-lost", f"{where}: {name}", expected=f"state of {world} ranks", found=told)


def _tokens(drilled: Drilled, evidence: DrillEvidence) -> Iterator[Finding]:
    trained = train_step(drilled.facts.values)
    tokens = count_tokens(drilled.facts.values)
    if not trained or tokens is None:
        return
    per_step, logged = evidence.goals.tokens_per_step, _logged_tokens(evidence.log, trained, drilled.facts.ranks)
    ranks = max(1, drilled.facts.ranks) if counts_by_rank(drilled.facts.values) else 1
    if per_step and not ranks_counted(tokens, trained * per_step, ranks):
        expected = f"{trained} steps of {per_step} tokens: {trained * per_step}"
        yield finding("consistency.tokens", drilled.save.name, expected=expected, found=str(tokens))
    elif logged and not ranks_counted(tokens, logged, ranks):
        yield finding(
            "consistency.tokens-logged", drilled.save.name, expected=f"{logged}, as logged up to step {trained}", found=str(tokens)
        )


def _logged_tokens(log: Sequence[Step], trained: int, saved_by: int) -> int:
    # Of all ranks up to a step; 0 unless every step of every rank is logged with its tokens. A log may be of the first rank only.
    before = [step for step in log if step.step <= trained and step.tokens]
    ranks = {step.rank for step in log}
    is_whole = len(ranks) >= saved_by and len(before) == trained * len(ranks)
    return sum(step.tokens for step in before) if is_whole else 0


def _moments(drilled: Drilled) -> Iterator[Finding]:
    facts, where = drilled.facts, drilled.save.name
    model = {entry.key: entry for entry in facts.of_role("model")}
    slots = {name: entries for name, entries in facts.slots().items() if name != "step" and any(e.numel > 1 for e in entries)}
    for entries in slots.values():
        yield from _fit(where, entries, model)
    yield from _same_parameters(where, slots)
    yield from _first_moment(where, slots)
    narrow = sorted({e.parameter for name, es in slots.items() if name != "master" for e in es if _is_narrower(e, model)})
    if narrow:
        yield finding(
            "consistency.moments-narrow", f"{where}: {name_some(narrow, 3)}", expected="fp32, as the parameters are", found="16 bits"
        )


def _is_narrower(entry: Entry, model: dict[str, Entry]) -> bool:
    return entry.dtype in _NARROW and entry.parameter in model and model[entry.parameter].dtype == "F32"


def _fit(where: str, entries: list[Entry], model: dict[str, Entry]) -> Iterator[Finding]:
    # Factored moments (Adafactor) and those in blocks (8-bit Adam) have slots and shapes of their own, which is no misfit.
    orphans = [entry for entry in entries if entry.parameter not in model]
    for entry in entries:
        whole = model.get(entry.parameter)
        if (
            entry.slot in WHOLE_SLOTS
            and whole is not None
            and len(entry.shape) == len(whole.shape)
            and entry.shape != whole.shape
            and entry.numel > 1
        ):
            yield finding("consistency.moment-shape", f"{where}: {entry.key}", expected=str(whole.shape), found=str(entry.shape))
    if orphans:
        held = {entry.parameter for entry in entries}
        without = sum(prod(entry.shape) for key, entry in model.items() if key not in held)
        is_regrouped = sum(entry.numel for entry in orphans) == without
        code = "consistency.moments-regrouped" if is_regrouped else "consistency.orphan-moments"
        where = f"{where}: {name_some((entry.key for entry in orphans), 3)}"
        yield finding(code, where, expected="a parameter of this name", found=f"{len(orphans)} moments whose parameter the model has not")


def _same_parameters(where: str, slots: dict[str, list[Entry]]) -> Iterator[Finding]:
    moments = {name: {entry.parameter for entry in entries} for name, entries in slots.items() if name in ("exp_avg", "exp_avg_sq")}
    if len(moments) == 2 and slots.keys() <= WHOLE_SLOTS and moments["exp_avg"] != moments["exp_avg_sq"]:
        odd = name_some(moments["exp_avg"] ^ moments["exp_avg_sq"], 3)
        yield finding("consistency.moments-unpaired", f"{where}: {odd}", expected="both moments of each parameter", found="one of the two")


def _first_moment(where: str, slots: dict[str, list[Entry]]) -> Iterator[Finding]:
    # One parameter's first moment may have decayed to zero; that of every parameter cannot while the second has not.
    first = {entry.parameter: entry for entry in slots.get("exp_avg", ())}
    second = {entry.parameter for entry in slots.get("exp_avg_sq", ()) if entry.digest and not entry.is_zero}
    alive = second & first.keys()
    if alive and all(first[name].is_zero for name in alive):
        yield finding("consistency.first-moment-zero", where, expected="first moments of trained parameters", found="zeros everywhere")


CHECK = DrillCheck("consistency", "D2", examine)
