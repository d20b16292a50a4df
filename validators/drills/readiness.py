"""The readiness checklist: ten questions on whether training can come back from a checkpoint, each answered with its evidence.

What no checkpoint can know (what training does when a save fails, the storage budget) is declared by the run's owner, or "not declared".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from reports.errors import name_some
from reports.spell import spell_bytes, spell_seconds
from validators.drills.facts import StateFacts
from validators.drills.inventory import Component, take_inventory
from validators.drills.layout import read_layout

# Format → where it keeps what says how tensors are cut
SHARDING_METADATA: Mapping[str, str] = MappingProxyType(
    {
        "dcp": ".metadata, which is written last",
        "dcp_hf": "the header of every file; the number of ranks and the whole shapes are recorded nowhere",
        "fsdp1_ranks": "the ranks' files themselves",
        "zero": "the model states' file: parameter shapes and partitions; `latest` names the save",
        "universal": "one folder per parameter: tensors are whole",
        "megatron": "the arguments in every rank's file; latest_checkpointed_iteration.txt names the save",
        "megatron_dist": ".metadata, which is written last; latest_checkpointed_iteration.txt names the save",
        "hf": "nowhere: tensors are whole; the index names their files",
    }
)
# Formats whose own loader puts shards together for another number of ranks
RESHARDABLE: Mapping[str, str] = MappingProxyType(
    {
        "dcp": "yes, torch's loader reshards tensors; random numbers and data position are per rank and are not resharded",
        "dcp_hf": "tensors, by torch's loader; there is no training state",
        "zero": "not as it is: write it as universal first (shardwright reshard --format universal)",
        "universal": "yes, by DeepSpeed's universal loader",
        "megatron": "at the same tp, pp, vpp and ep, at any dp: the legacy format is not resharded",
        "megatron_dist": "yes, by Megatron's loader; an optimizer that is dp_reshardable only at the same tp, pp and ep",
        "hf": "weights are whole; the optimizer's state is the trainer's",
        "fsdp1_ranks": "no: one file per rank; merge it first",
    }
)
NOT_DECLARED = "not declared"


@dataclass(frozen=True, slots=True)
class Declared:
    """What a run's owner says of it; "" and 0 are "not declared"."""

    on_failed_save: str = ""
    export_schedule: str = ""
    keep: int = 0
    budget_nbytes: int = 0
    save_interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies around a checkpoint: complete saves beside it, seconds between saves as file times tell, free bytes, the last drill."""

    kept: tuple[str, ...] = ()
    interval_seconds: float = 0.0
    checkpoint_nbytes: int = 0
    free_nbytes: int = 0
    last_passed: str = ""
    exported: str = ""
    declared: Declared = field(default_factory=Declared)


@dataclass(frozen=True, slots=True)
class Answer:
    """One question, its answer, and on what that rests."""

    question: str
    answer: str
    evidence: str


def answer_readiness(facts: StateFacts, around: Surroundings) -> tuple[Answer, ...]:
    """Answer the ten questions.

    Args:
        facts: what the checkpoint says.
        around: what lies around it.

    Returns:
        Ten answers, in the order of the checklist.
    """
    parts = {component.name: component for component in take_inventory(facts)}
    return tuple(Answer(question, *reply(facts, parts, around)) for question, reply in QUESTIONS)


_Parts = Mapping[str, Component]
_Reply = Callable[[StateFacts, _Parts, Surroundings], tuple[str, str]]


def _full(facts: StateFacts, parts: _Parts, _: Surroundings) -> tuple[str, str]:
    lacking = [
        name
        for name in ("optimizer moments", "train step", "lr scheduler", "random numbers", "data position")
        if parts[name].presence == "missing"
    ]
    if parts["optimizer moments"].presence == "missing" and not facts.slots():
        return "model only", "no optimizer state is in it"
    return (
        "full" if not lacking else "partial"
    ), f"missing: {', '.join(lacking)}" if lacking else "optimizer, step, schedule, random numbers and data position are there"


def _sharded(facts: StateFacts, *_: object) -> tuple[str, str]:
    if facts.fragments <= 1:
        return "no", "every tensor is whole"
    return (
        f"yes, {read_layout(facts).spell()}",
        f"tensors in up to {facts.fragments} parts, in files of {facts.ranks or 'no known number of'} ranks",
    )


def _metadata(facts: StateFacts, *_: object) -> tuple[str, str]:
    return SHARDING_METADATA[facts.format], f"format {facts.format}"


def _other_world(facts: StateFacts, *_: object) -> tuple[str, str]:
    return RESHARDABLE[facts.format], f"format {facts.format}; `shardwright drill` tries it for dcp"


def _export(_: StateFacts, __: _Parts, around: Surroundings) -> tuple[str, str]:
    return around.declared.export_schedule or NOT_DECLARED, around.exported or "no green export of this run is known"


def _optimizer(facts: StateFacts, parts: _Parts, _: Surroundings) -> tuple[str, str]:
    part, slots = parts["optimizer moments"], facts.slots()
    if part.presence == "missing":
        return "no", "no optimizer state is in it"
    if not slots:
        return "there, wholeness not known", part.where
    whole = {entry.parameter: entry.shape for entry in facts.of_role("model")}
    fitting = [
        e for name, entries in slots.items() if name not in ("step",) for e in entries if e.numel > 1 and whole.get(e.parameter) == e.shape
    ]
    covered = {entry.parameter for entry in fitting}
    lacking = sorted(set(whole) - covered)
    more = f", not {name_some(lacking)}" if lacking else ""  # tied, frozen, or lost
    return "there", f"{part.detail}; {len(covered)} of {len(whole)} model tensors have moments of their own shape{more}"


def _data(_: StateFacts, parts: _Parts, __: Surroundings) -> tuple[str, str]:
    part = parts["data position"]
    return {"present": "from its saved state", "derivable": "only by derivation", "missing": "not at all"}[
        part.presence
    ], part.where or part.detail or "no position is in it"


def _keeping(_: StateFacts, __: _Parts, around: Surroundings) -> tuple[str, str]:
    declared = around.declared
    interval = declared.save_interval_seconds or around.interval_seconds
    every = f"every {spell_seconds(interval)}" if interval else "interval not known"
    kept = f"{len(around.kept)} kept" + (f" of {declared.keep} declared" if declared.keep else "")
    used = f"{spell_bytes(around.checkpoint_nbytes)} each, {spell_bytes(around.free_nbytes)} free"
    budget = spell_bytes(declared.budget_nbytes) if declared.budget_nbytes else NOT_DECLARED
    return f"{every}, {kept}, budget {budget}", f"{', '.join(around.kept[-5:]) or 'none'}; {used}"


def _failed_save(_: StateFacts, __: _Parts, around: Surroundings) -> tuple[str, str]:
    said = around.declared.on_failed_save
    return said or NOT_DECLARED, "declared by the owner" if said else "say so in the drill's YAML: on_failed_save"


def _last_test(_: StateFacts, __: _Parts, around: Surroundings) -> tuple[str, str]:
    return around.last_passed or "never, as far as is known", "the history of drills"


QUESTIONS: tuple[tuple[str, _Reply], ...] = (
    ("Is it full or model-only?", _full),
    ("Is it sharded, and how?", _sharded),
    ("Where does the sharding metadata live?", _metadata),
    ("Can it resume at another world size?", _other_world),
    ("Is a release export scheduled?", _export),
    ("Is the optimizer state there and whole?", _optimizer),
    ("How do dataloader and sampler come back?", _data),
    ("Save interval, number kept, storage budget?", _keeping),
    ("What does training do when a save fails?", _failed_save),
    ("When did a restore test last pass?", _last_test),
)
