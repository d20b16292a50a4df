"""Planning step between dtypes and places: which weights are quantized, how, and what stands for them.

The first rule whose pattern matches a weight's name decides. Only linear layers are ever quantized: what the family ignores (the head,
routers) and what is no matrix of a linear layer stays as it is; so does a weight its encoding cannot hold, with the reason.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from reports.errors import RequestError, name_some
from tasks.engine.encodings.encoding import Encoding
from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.families.family import Family
from tasks.engine.planning.plan import Part, Quantized, QuantizedGroup, TensorPlan, Whole
from validators.quantization import EMBEDDINGS, matches_name

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_CLASS = "Linear"
_SUFFIX = ".weight"
# What vLLM fuses into one linear layer, by the last parts of the modules' names.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True, slots=True)
class QuantizeRule:
    """Weights whose names match `pattern` (`*` and `?`) get `encoding`, a key of ENCODINGS; "" leaves them whole, `because` says why."""

    pattern: str
    encoding: str
    because: str = ""


@dataclass(frozen=True, slots=True)
class _Chosen:
    # What is done with the weight of one linear layer: an encoding, or why it stays whole.
    encoding: Encoding | None
    because: str = ""


def in_words(quantized: Quantized) -> tuple[str, ...]:
    """Return which weights stay whole and why, a line for every role and reason.

    Args:
        quantized: of a plan.

    Returns:
        Lines, in the order of the weights.
    """
    whole = {whole.name: whole.because for whole in quantized.whole}
    return tuple(f"{names} is not quantized: {because}" for names, because in name_roles(whole))


def name_roles(reasons: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return names with their reasons, those of one role and reason as one.

    Args:
        reasons: by tensor name.

    Returns:
        The role and how many, or the name of a single one; and the reason. In the order of the names.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name, because in reasons.items():
        names.setdefault((_role(name), because), []).append(name)
    return tuple((f"{role} ({len(of)})" if len(of) > 1 else of[0], because) for (role, because), of in names.items())


def split_fusions(tensors: Iterable[TensorPlan], quantized: Quantized) -> tuple[str, ...]:
    """Return which layers vLLM will refuse, because it fuses linear layers that are not stored in one way.

    Args:
        tensors: all targets of a plan.
        quantized: the plan's.

    Returns:
        A line for every role of fused layers and the ways they are stored. Source: vLLM, packed_modules_mapping of its models, and
        should_ignore_layer in quantization/compressed_tensors/utils.py.
    """
    ways = {_module(tensor.part.weight): tensor.encoding for tensor in tensors if tensor.part is not None}
    ways |= {_module(whole.name): "whole" for whole in quantized.whole}
    counts: Counter[str] = Counter()
    for block in dict.fromkeys(module.rpartition(".")[0] for module in ways):
        for fused in _FUSED:
            found = {name: ways[f"{block}.{name}"] for name in fused if f"{block}.{name}" in ways}
            if len(set(found.values())) > 1:
                counts[f"{_role(block)}: {', '.join(f'{name} {way}' for name, way in found.items())}"] += 1
    return tuple(f"vLLM fuses these and takes them in one encoding only: {line}{f' ({n})' if n > 1 else ''}" for line, n in counts.items())


def check_quantizable(family: Family | None) -> Family:
    """Return the family, where it can be quantized.

    Args:
        family: of the model.

    Returns:
        The same.

    Raises:
        RequestError: no family says which tensors are weights of linear layers, or the family has none.
    """
    if family is None:
        remedy = "Quantize models of a family only; add one (README, how to add a family), or export without --quantize."
        raise RequestError("needs a family, which says what linear layers and routers are", where="--quantize", remedy=remedy)
    if family.not_linear:
        raise RequestError(f"cannot quantize {family.name}: {family.not_linear}", where="--quantize", remedy="Export it without.")
    return family


def plan_parts(planned: Sequence[TensorPlan], rules: Sequence[QuantizeRule], family: Family) -> tuple[tuple[TensorPlan, ...], Quantized]:
    """Put the parts of quantized weights in the weights' places.

    Args:
        planned: targets with their dtypes.
        rules: the first that matches counts; a weight that none matches stays whole.
        family: says what is ignored.

    Returns:
        Targets in the same order; what the release must say of them.

    Raises:
        RequestError: a rule matches nothing, or decides nothing.
    """
    _refuse_unmatched(planned, rules)
    modules = {_module(t.name): t for t in planned if _is_matrix(t)}
    skipped = {m: p for m in modules for p in family.ignore if matches_name(p, m)}
    linear = {m: t for m, t in modules.items() if m not in skipped and t.name != family.embedding}
    _refuse_ignored([modules[module].name for module in skipped], [t.name for t in linear.values()], rules, family)
    _refuse_idle([t.name for t in linear.values()], rules)
    chosen = {m: _choose(t, rules) for m, t in linear.items()}
    parts = tuple(part for tensor in planned for part in _parts(tensor, chosen.get(_module(tensor.name))))
    groups = _groups(chosen)
    kept = [module for module, choice in chosen.items() if choice.encoding is None]
    tied = [p for p in family.ignore if p == _module(family.head)]
    ignore = (*(p for p in family.ignore if p in skipped.values() or p in tied), *_patterns(kept, chosen)) if groups else ()
    whole = tuple(Whole(modules[module].name, chosen[module].because) for module in kept)
    return parts, Quantized(groups, ignore, whole)


def _refuse_unmatched(planned: Sequence[TensorPlan], rules: Sequence[QuantizeRule]) -> None:
    for rule in rules:
        if not any(fnmatchcase(tensor.name, rule.pattern) for tensor in planned):
            raise RequestError(
                f"pattern {rule.pattern!r} matches no tensor", where="--quantize", remedy="Look at the names with shardwright plan --out."
            )


def _refuse_ignored(ignored: Sequence[str], others: Sequence[str], rules: Sequence[QuantizeRule], family: Family) -> None:
    for rule in rules:
        meant = [name for name in ignored if fnmatchcase(name, rule.pattern)]
        if rule.encoding and meant and not any(fnmatchcase(name, rule.pattern) for name in others):
            raise RequestError(
                f"pattern {rule.pattern!r} means {name_some(meant)}, which family {family.name} never quantizes",
                where="--quantize",
                remedy="Take the rule out: serving engines keep the head and routers as they are.",
            )


def _refuse_idle(linear: Sequence[str], rules: Sequence[QuantizeRule]) -> None:
    # A rule that decides nothing is a mistake of order or of name; a last one for everything else is not.
    taken: set[str] = set()
    for at, rule in enumerate(rules):
        meant = {name for name in linear if fnmatchcase(name, rule.pattern)}
        is_rest = at > 0 and at == len(rules) - 1 and rule.pattern == "*"
        if meant and meant <= taken and not is_rest:
            raise RequestError(
                f"pattern {rule.pattern!r} decides nothing: rules before it take all that it matches",
                where="--quantize",
                remedy="The first rule that matches counts: put this one before them, or take it out.",
            )
        if rule.encoding and not meant:
            raise RequestError(
                f"pattern {rule.pattern!r} matches no weight of a linear layer, and nothing else is quantized",
                where="--quantize",
                remedy="Take the rule out, or correct its pattern.",
            )
        taken |= meant


def _is_matrix(tensor: TensorPlan) -> bool:
    return tensor.name.endswith(_SUFFIX) and len(tensor.shape) == 2 and _module(tensor.name).rpartition(".")[2] not in EMBEDDINGS


def _module(name: str) -> str:
    return name.removesuffix(_SUFFIX)


def _choose(tensor: TensorPlan, rules: Sequence[QuantizeRule]) -> _Chosen:
    rule = next((rule for rule in rules if fnmatchcase(tensor.name, rule.pattern)), None)
    if rule is None:
        return _Chosen(None, "no rule of the request names it")
    if not rule.encoding:
        return _Chosen(None, rule.because)
    encoding = ENCODINGS[rule.encoding]
    because = encoding.why_not(tensor.spec)
    return _Chosen(None, because) if because else _Chosen(encoding)


def _parts(tensor: TensorPlan, choice: _Chosen | None) -> tuple[TensorPlan, ...]:
    if choice is None or choice.encoding is None:
        return (tensor,)
    return tuple(
        replace(
            tensor,
            name=spec.fqn,
            shape=spec.shape,
            dtype=spec.dtype,
            encoding=choice.encoding.name,
            part=Part(tensor.name, suffix, tensor.shape, tensor.dtype),
        )
        for suffix, spec in choice.encoding.resolve(tensor.spec)
    )


def _groups(chosen: Mapping[str, _Chosen]) -> tuple[QuantizedGroup, ...]:
    # One encoding for all linear layers is said of their class; several are told apart by name.
    modules: dict[str, list[str]] = {}
    for module, choice in chosen.items():
        if choice.encoding is not None:
            modules.setdefault(choice.encoding.name, []).append(module)
    if len(modules) == 1:
        return tuple(QuantizedGroup(name, (_CLASS,)) for name in modules)
    return tuple(QuantizedGroup(name, _patterns(members, chosen)) for name, members in modules.items())


def _patterns(members: Sequence[str], everything: Iterable[str]) -> tuple[str, ...]:
    # A role that is whole in `members` is one pattern over its indices; of others, every module is named.
    outside = {_role(module) for module in set(everything) - set(members)}
    named: dict[str, None] = {}
    for module in members:
        role = _role(module)
        is_pattern = role != module and role not in outside
        named["re:^" + re.escape(role).replace(r"\*", r"\d+") + "$" if is_pattern else module] = None
    return tuple(named)


def _role(module: str) -> str:
    return _INDEX.sub("*", module)
