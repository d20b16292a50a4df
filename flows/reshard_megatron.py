"""`shardwright reshard --format megatron`: weights of any source as the ranks of a Megatron run hold them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from reports.errors import RequestError, name_some
from tasks.engine.families.dims import Config, Dims
from tasks.engine.families.family import Family
from tasks.engine.families.megatron import NAMING, choose_names
from tasks.engine.families.prediction import copies_of_predictions
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.choose import choose_family
from tasks.engine.planning.derive import derive_config
from tasks.engine.planning.invert import invert_naming
from tasks.engine.planning.megatron_ranks import RankLayout, plan_ranks, refuse_heads
from tasks.engine.planning.megatron_run import RunOf, arguments_of
from tasks.engine.planning.plan import Alias, ExportPlan
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.planning.stated import check_stated
from tasks.engine.tensors.catalog import Catalog
from tasks.engine.tensors.rules import Naming
from tasks.engine.writing.megatron import MegatronSave, compare_written, write_megatron
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tasks.reshard import describe_unknown, read_config
from validators.expectation import Expectation

_SHARED = "a prediction layer shares it with the model in Megatron"
_SPEC, _VOCAB_MULTIPLE = "local", 128  # where neither the request nor the source says


@dataclass(frozen=True, slots=True)
class MegatronRequest:
    """What is asked for: a source, its config, how many ranks each axis has, (pattern, reason) of source tensors that are left out, two
    of Megatron's own arguments, and the layers of each stage where they are not equal.
    """

    source: Path
    also: tuple[Path, ...]
    step: int | None
    tag: str
    assets: Path | None
    family: str
    ranks: Mapping[str, int]
    drops: tuple[tuple[str, str], ...] = ()
    spec: str | None = None
    vocab_multiple: int | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Model:
    # What is known of the model: its config, the family that fits, and Megatron's naming of it.
    config: Config
    family: Family
    dims: Dims
    expected: Expectation
    naming: Naming


def write_megatron_save(request: MegatronRequest, folder: Path) -> None:
    """Write the save, and prove it by reading it back.

    Args:
        request: what to write.
        folder: an empty folder.

    Raises:
        RequestError: no config, a family without Megatron's naming, or sizes that do not divide.
        ReleaseError: whatever reading and writing show.
    """
    reader = open_checkpoint(request.source, also=request.also, step=request.step, tag=request.tag)
    catalog = reader.catalog()
    model = _find_model(request, catalog)
    asked = PlanRequest(model.family, model.dims, model.expected)
    plan = make_plan(catalog, replace(asked, drops=request.drops))
    copies = copies_of_predictions(name for name in catalog.tensors if name not in model.expected.shapes)
    plan = replace(plan, aliases=(*plan.aliases, *(Alias(name, of, _SHARED) for name, of in copies.items())))
    save = _plan_save(request, catalog, model, plan)
    source = SourceBytes(reader, catalog)
    try:
        check_replicas(plan, source)
        write_megatron(source, plan, save, folder)
        compare_written(folder, asked, source, plan)
    finally:
        source.files.close()


def _find_model(request: MegatronRequest, catalog: Catalog) -> _Model:
    assets = request.assets or next((root for root in (Path(catalog.root), request.source) if (root / "config.json").is_file()), None)
    config = read_config(assets) or derive_config(catalog.stated)
    copies = copies_of_predictions(catalog.tensors)
    stored = [name for name in catalog.tensors if name not in copies]
    choice = choose_family(request.family, config, keep_tied_head=False, describe=lambda _: describe_unknown(assets), stored=stored)
    family, dims, expected = choice.family, choice.dims, choice.expected
    naming = next((naming for naming in family.namings if naming.name == NAMING), None) if family else None
    if family is None or dims is None or expected is None or naming is None:
        raise RequestError("no rules say what Megatron calls this model's tensors", where="--family", remedy="Name a family that has them.")
    check_stated(catalog.stated, config, dims)
    return _Model(config, family, dims, expected, naming)


def _plan_save(request: MegatronRequest, catalog: Catalog, model: _Model, plan: ExportPlan) -> MegatronSave:
    lacking = model.expected.shapes.keys() - {tensor.name for _, tensor in plan.tensors()}
    if lacking:
        raise RequestError(f"leaves out {name_some(lacking)}, which ranks hold", where="--drop", remedy="Drop what is no weight only.")
    dims, num_experts = model.dims, model.dims.sizes.get("num_experts", 0)
    layout = RankLayout(**request.ranks, layers=request.layers)
    layout = layout if num_experts else replace(layout, etp=layout.tp)
    refuse_heads(layout, dims.size("num_heads"), dims.size("num_kv_heads"))
    spec = request.spec or str(catalog.stated.get("spec", _SPEC))
    multiple = request.vocab_multiple or int(catalog.stated.get("vocab_multiple", _VOCAB_MULTIPLE))
    held = invert_naming(model.naming, model.expected, dims.sizes, dims.num_layers, partial(choose_names, spec=spec))
    stages = plan_ranks(held, layout, dims.num_layers, num_experts, multiple)
    return MegatronSave(
        layout, stages, arguments_of(RunOf(model.family.name, model.config, dims, layout, spec, multiple, model.family.num_predicted))
    )
