"""The whole of planning: a catalog and a request in, an ExportPlan out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from reports.errors import RequestError, name_some
from tasks.engine.families.dims import Dims
from tasks.engine.families.family import Family
from tasks.engine.planning.encode import DtypePolicy, plan_encodings
from tasks.engine.planning.merge import Model, plan_merge
from tasks.engine.planning.pack import pack
from tasks.engine.planning.plan import Dropped, ExportPlan, PlanSource, Quantized, TensorPlan, digest_plan
from tasks.engine.planning.quantize import QuantizeRule, check_quantizable, plan_parts
from tasks.engine.planning.renames import Tie, plan_renames
from tasks.engine.tensors.catalog import Catalog
from tasks.engine.tensors.ops import EXPERT
from tasks.engine.tensors.rules import Drop, Naming, published
from validators.expectation import Expectation

DEFAULT_MAX_FILE_BYTES = 5_000_000_000  # huggingface-hub's "5GB"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is asked for. Without `expected`, names stay as they are (`--family none`); without `family`, the names are those of
    the expectation. `drops` are (pattern of source names, reason); `keep` are released names that a cast leaves alone, beside the family's.
    `quantize` says which weights are quantized; none without a rule.
    """

    family: Family | None = None
    dims: Dims | None = None
    expected: Expectation | None = None
    dtype: str = ""
    drops: tuple[tuple[str, str], ...] = ()
    keep_tied_head: bool = False
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    keep: tuple[str, ...] = ()
    quantize: tuple[QuantizeRule, ...] = ()


def make_plan(catalog: Catalog, request: PlanRequest) -> ExportPlan:
    """Plan an export: merge, rename, encode, quantize, pack.

    Args:
        catalog: the checkpoint.
        request: what to make of it.

    Returns:
        A plan that consumes every source tensor once, or says why not, and produces every target once.

    Raises:
        ReleaseError: one of its subclasses; see the planning steps.
    """
    asked = _drops(catalog, request.drops)
    names = [name for name in catalog.tensors if name not in asked]
    if not names:
        what = "--drop leaves no tensor to export" if asked else "holds no tensor of a model"
        raise RequestError(what, where=catalog.root, remedy="Drop less." if asked else "Point at a checkpoint of a model.")
    model = _model(names, request)
    dropped = _dropped_by_rule(names, model.naming)
    specs = plan_merge(catalog, model, frozenset(asked) | dropped)
    given_up = tuple(Dropped(name, because, "request", _targets_of(name, model)) for name, because in asked.items())
    renamed = plan_renames(specs, names, model, _tie(request), frozenset(t for drop in given_up for t in drop.targets))
    made = {draft.name for draft in renamed.drafts}
    given_up = tuple(replace(drop, targets=tuple(t for t in drop.targets if t not in made)) for drop in given_up)
    policy = DtypePolicy(request.dtype, (*(request.family.keep_fp32 if request.family else ()), *request.keep))
    targets, quantized = _quantize(plan_encodings(renamed.drafts, policy), request)
    files = pack(targets, request.max_file_bytes)
    plan = ExportPlan(
        source=PlanSource(catalog.format, catalog.root, catalog.step, catalog.digest, catalog.weights),
        family=model.family,
        naming=model.naming.name,
        dims={**request.dims.sizes, **request.dims.flags} if request.dims else {},
        files=files,
        aliases=renamed.aliases,
        dropped=(*renamed.dropped, *given_up),
        kept_dtype=tuple(sorted(t.name for file in files for t in file.tensors if policy.dtype and policy.keeps(t.name))),
        quantized=quantized,
    )
    return replace(plan, digest=digest_plan(plan))


def _quantize(planned: tuple[TensorPlan, ...], request: PlanRequest) -> tuple[tuple[TensorPlan, ...], Quantized | None]:
    if not request.quantize:
        return planned, None
    return plan_parts(planned, request.quantize, check_quantizable(request.family))


def _drops(catalog: Catalog, drops: Sequence[tuple[str, str]]) -> dict[str, str]:
    asked: dict[str, str] = {}
    for pattern, because in drops:
        matched = [name for name in catalog.tensors if fnmatchcase(name, pattern)]
        if not matched:
            raise RequestError(
                f"--drop {pattern!r} matches no source tensor",
                where=catalog.root,
                remedy=f"The checkpoint holds {name_some(catalog.tensors)}.",
            )
        asked.update(dict.fromkeys(matched, because))
    return asked


def _model(names: Sequence[str], request: PlanRequest) -> Model:
    expected = request.expected
    if expected is None:
        return Model("none", Naming("own", tuple(published(names))), {}, {})
    sizes: Mapping[str, int] = request.dims.sizes if request.dims else {}
    if request.family is None:
        heads = [alias for _, alias in expected.tied if expected.is_tied]
        return Model(expected.family, Naming("own", tuple(published([*expected.shapes, *heads]))), expected.shapes, sizes)
    return Model(expected.family, request.family.naming(names), expected.shapes, sizes)


def _dropped_by_rule(names: Sequence[str], naming: Naming) -> frozenset[str]:
    return frozenset(name for name in names if (match := naming.match(name)) and isinstance(match.row, Drop))


def _tie(request: PlanRequest) -> Tie | None:
    if request.expected is None or not request.expected.is_tied or not request.expected.tied:
        return None
    ((kept, alias),) = request.expected.tied
    return Tie(kept, alias, request.keep_tied_head)


def _targets_of(name: str, model: Model) -> tuple[str, ...]:
    match = model.naming.match(name)
    if match is None:
        return ()
    experts = range(model.sizes.get("num_experts", 0))
    return tuple(
        filled
        for target in match.targets
        for filled in ([target.replace(EXPERT, str(e)) for e in experts] if EXPERT in target else [target])
        if filled in model.shapes
    )
