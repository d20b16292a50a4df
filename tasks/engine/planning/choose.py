"""Which family a model is of, from the request and its config."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from reports.errors import RequestError
from tasks.engine.families.dims import Config, Dims
from tasks.engine.families.families import FAMILIES, find_family
from tasks.engine.families.family import Family
from tasks.engine.planning.plan import ExportPlan
from validators.expectation import Expectation

AUTO, NONE = "auto", "none"
Describe = Callable[[Config], Expectation]


@dataclass(frozen=True, slots=True)
class Choice:
    """A model's family, its sizes and what its release holds. All None for `--family none`; no family, but an expectation, for an
    architecture that only transformers knows.
    """

    family: Family | None = None
    dims: Dims | None = None
    expected: Expectation | None = None


def choose_family(name: str, config: Config, *, keep_tied_head: bool, describe: Describe, stored: Collection[str] = ()) -> Choice:
    """Return the family to export as.

    Args:
        name: "auto", "none" or a family's name.
        config: parsed config.json; empty when there is none.
        keep_tied_head: whether a tied head is written as well.
        describe: asks transformers' meta-device model; called only for "auto" and a model type no family has.
        stored: names in the checkpoint; they say whether it holds prediction layers.

    Returns:
        The choice.

    Raises:
        RequestError: no such family, no config, or a config of another family.
    """
    if name == NONE:
        return Choice()
    known = {family.name: family for family in FAMILIES}
    if name not in (AUTO, *known):
        raise RequestError(f"no family {name!r}", where="--family", remedy=f"There are auto, none, {', '.join(sorted(known))}.")
    if not config:
        raise RequestError(
            "no config.json, so names and shapes cannot be checked",
            where="--assets",
            remedy="Give the folder of config.json and tokenizer with --assets, or keep the checkpoint's own names with --family none.",
        )
    if name == AUTO and not config.get("model_type"):
        raise RequestError(
            "has no model_type, so the family is not known",
            where="config.json",
            remedy=f"Give the model's own config.json with --assets, or name its family with --family: {', '.join(sorted(known))}.",
        )
    family = find_family(config) if name == AUTO else known[name]
    if family is None:
        return Choice(expected=describe(config))
    if config.get("model_type") not in (None, *family.model_types):
        raise RequestError(
            f"config.json says model_type {config.get('model_type')!r}, family {family.name} has {', '.join(family.model_types)}",
            where="--family",
            remedy="Use --family auto.",
        )
    dims = family.dims(config)
    family = family.predicting(config, dims, stored)
    return Choice(family, dims, family.expectation(dims, keep_tied_head=keep_tied_head))


def expectation_for(plan: ExportPlan, choice: Choice) -> Expectation | None:
    """Return what the release should hold: the family's expectation without what was dropped on request.

    Args:
        plan: its drops say what is missing on purpose.
        choice: the family.

    Returns:
        None for `--family none`.
    """
    if choice.expected is None:
        return None
    given_up = {target for drop in plan.dropped for target in drop.targets}
    shapes: Mapping[str, tuple[int, ...]] = {n: s for n, s in choice.expected.shapes.items() if n not in given_up}
    return replace(choice.expected, shapes=shapes)
