"""The training-state inventory: which components a resume needs, and whether a checkpoint has them.

A *component* is present, derivable (from what is said), or missing. Names are matched, not guessed at: a row's pattern lists how the
frameworks spell it. Sources: torch 2.13 (state-dict API), torchtitan 0.3, accelerate 1.15, transformers 5.24 (Trainer), DeepSpeed 0.19,
Megatron-LM core 0.16.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from reports.errors import name_some
from validators.drills.facts import StateFacts
from validators.drills.layout import describe_context, read_layout

Presence = Literal["present", "derivable", "missing"]
_START = r"(?:^|[./])"  # of a component of a dotted key


@dataclass(frozen=True, slots=True)
class Component:
    """One row of the inventory. `where` names places, `detail` what was found there, or from what it can be derived."""

    name: str
    presence: Presence
    where: str
    detail: str


Derive = Callable[[StateFacts], str]  # from what a component can be had when it is not stored; "" when it cannot


def _never(_: StateFacts) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class _Row:
    # `slots`: the optimizer's slots that are it; `pattern`: keys that are it.
    name: str
    slots: frozenset[str]
    pattern: re.Pattern[str] | None
    derive: Derive = _never
    lacking: str = ""


def _keys(*spellings: str) -> re.Pattern[str]:
    return re.compile(_START + "(?:" + "|".join(spellings) + ")", re.IGNORECASE)


def _when(test: Callable[[StateFacts], bool], words: str) -> Derive:
    return lambda facts: words if test(facts) else ""


def _model_is_fp32(facts: StateFacts) -> bool:
    return {entry.dtype for entry in facts.of_role("model")} <= {"F32", "F64", "I64", "I32", "BOOL", "U8"}


def _no_fp16(facts: StateFacts) -> bool:
    return "F16" not in {entry.dtype for entry in facts.entries.values()}


def _has_step(facts: StateFacts) -> bool:
    return facts.step is not None or any(_STEP.search(name) for name in facts.names()) or "step" in facts.slots()


_STEP = _keys(
    r"(?:train_state|trainer_state(?:\.json)?|trainer|progress)\.(?:global_)?step$",
    r"(?:global_step|iteration|global_steps)$",
    r"(?<!\d\.)step$",
)
_NOT_MOMENTS = frozenset({"master", "step", "grad"})

# Component → what it may be of → how that is spelled
_KINDS: Mapping[str, Mapping[str, re.Pattern[str]]] = MappingProxyType(
    {
        "random numbers": {
            "python": _keys("python", "random_state", "random_rng_state"),
            "numpy": _keys("numpy", "np_rng_state"),
            "torch on the CPU": _keys("torch(?:$|\\.)", "cpu", "torch_manual_seed", "torch_rng_state"),
            "accelerators": _keys("cuda", "torch_cuda", "xpu", "npu", "rng_tracker"),
        }
    }
)
ROWS: tuple[_Row, ...] = (
    _Row(
        "optimizer moments",
        frozenset({"*"}),
        _keys(r"optimizer\.(?:pt|bin)", r"optim\w*[._-]rank[_-]?\d+\.", r"state\.\d+\.exp_avg", r"optimizer(?:_state\w*)?$"),
    ),
    _Row(
        "master weights",
        frozenset({"master"}),
        _keys("fp32_from_fp16", "single_partition_of_fp32", "master_params?"),
        _when(_model_is_fp32, "the model itself: it is saved in fp32"),
        "parameters in low precision and no fp32 copy: right only if the trainer keeps none",
    ),
    _Row("optimizer step", frozenset({"step"}), _keys(r"param_groups\.\d+\.step$", r"state\.\d+\.step")),
    _Row("train step", frozenset(), _STEP, _when(lambda facts: facts.step is not None, "the folder's name")),
    _Row(
        "lr scheduler",
        frozenset(),
        _keys(r"(?:lr_)?schedulers?(?:\.|$)", r"lr_schedulers?", "sched(?:\\.|$)", "opt_param_scheduler"),
        _when(_has_step, "the step, if the schedule is a function of it"),
    ),
    _Row(
        "gradient scaler",
        frozenset(),
        _keys(r"(?:grad_)?scaler", "loss_scaler", "cur_scale"),
        _when(_no_fp16, "not needed: nothing is in fp16"),
    ),
    _Row(
        "unreduced gradients",
        frozenset({"grad"}),
        _keys("grad_accum", "averaged_gradients"),
        _when(_has_step, "none pending, if saves are made between steps"),
    ),
    _Row("random numbers", frozenset(), _keys(r"rng(?:_state\w*)?(?:\.|$)", r"\w*rng_states?", r"random_states?", "random_rng_state")),
    _Row(
        "data position",
        frozenset(),
        _keys("data_?loader", r"dl_state_dict", r"sampler(?:_\d+)?\.", "dataset_state", "data_state", "sampler_state"),
        _when(_has_step, "the step, if the data order is a function of seed and step"),
    ),
    _Row(
        "consumed samples",
        frozenset(),
        _keys("consumed_(?:train_)?samples", "samples_yielded", "num_samples", "global_samples"),
        _when(_has_step, "step times samples per step"),
    ),
    _Row(
        "consumed tokens",
        frozenset(),
        _keys("ntokens_seen", r"\w*tokens_seen", "consumed_tokens", "num_tokens"),
        _when(_has_step, "step times tokens per step"),
    ),
    _Row(
        "accumulation position",
        frozenset(),
        _keys("micro_?step", "accumulation_step"),
        _when(_has_step, "zero, if saves are made between steps"),
    ),
    _Row("run configuration", frozenset(), _keys("args(?:\\.|$)", r"config(?:\.|$)", r"training_args\.bin", r"hyper_parameters")),
    _Row("versions", frozenset(), _keys(r"\w*version$", "checkpoint_version")),
)


def take_inventory(facts: StateFacts) -> tuple[Component, ...]:
    """Return what a resume needs, and whether it is there.

    Args:
        facts: what the checkpoint says.

    Returns:
        One component per row, the model first, the parallel layout last.
    """
    model = facts.of_role("model")
    dtypes = ", ".join(sorted({entry.dtype for entry in model}))
    first = Component("model", "present" if model else "missing", facts.format, f"{len(model)} tensors of {dtypes}" if model else "")
    return (first, *(_look(row, facts) for row in ROWS), *_describe_layout(facts))


def presence_of(components: tuple[Component, ...], name: str) -> Presence:
    """Return whether one component is there.

    Args:
        components: an inventory.
        name: one of its names.

    Returns:
        Its presence.
    """
    return next(component.presence for component in components if component.name == name)


def _look(row: _Row, facts: StateFacts) -> Component:
    slots = {slot: entries for slot, entries in facts.slots().items() if _is_slot(slot, row.slots)}
    if slots:
        counted = ", ".join(f"{slot} of {len(entries)} parameters" for slot, entries in slots.items())
        dtypes = ", ".join(sorted({entry.dtype for entries in slots.values() for entry in entries}))
        return Component(row.name, "present", "optimizer's tensors", f"{counted}; {dtypes}")
    keys = [name for name in dict.fromkeys(facts.names()) if row.pattern is not None and row.pattern.search(name)]
    if keys:
        saved = [key for key in keys if key in facts.entries or f"other/{key}" in facts.entries]  # rather than what is inside them
        return Component(row.name, "present", name_some(saved or keys, 3), _detail(row.name, keys, facts))
    derived = row.derive(facts)
    return Component(row.name, "derivable" if derived else "missing", "", derived or row.lacking)


def _describe_layout(facts: StateFacts) -> tuple[Component, Component]:
    layout = read_layout(facts)
    is_whole = bool(layout.ranks) and all(row.coordinates for row in layout.ranks)
    is_known, told = describe_context(layout)
    context = Component("context parallelism", "present" if is_known else "missing", "", told)
    return Component("parallel layout", "present" if is_whole else "missing", layout.basis, layout.spell()), context


def _is_slot(slot: str, wanted: frozenset[str]) -> bool:
    return slot in wanted or ("*" in wanted and slot not in _NOT_MOMENTS)


def _detail(name: str, keys: list[str], facts: StateFacts) -> str:
    if name in _KINDS:
        kinds = [kind for kind, pattern in _KINDS[name].items() if any(pattern.search(key) for key in keys)]
        if kinds:
            return f"of {', '.join(kinds)}"
    values = [f"{facts.values[key]}" for key in keys if key in facts.values]
    if values:
        return values[0] if len(values) == 1 else f"{len(values)} values"
    return next((f"not opened: {facts.unread[key]}" for key in keys if key in facts.unread), "")
