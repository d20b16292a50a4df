"""`shardwright reshard --format megatron`: weights of any source as the ranks of a Megatron run hold them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reports.errors import RequestError

_SPEC, _VOCAB_MULTIPLE = "local", 128  # where neither the request nor the source says


@dataclass(frozen=True, slots=True)
class MegatronRequest:
    """What is asked for: a source, its config, how many ranks each axis has, and two of Megatron's own arguments."""

    source: Path
    also: tuple[Path, ...]
    step: int | None
    tag: str
    assets: Path | None
    family: str
    ranks: Mapping[str, int]
    spec: str | None = None
    vocab_multiple: int | None = None


def write_megatron_save(request: MegatronRequest, folder: Path) -> None:
    """Write the save, and prove it by reading it back.

    Args:
        request: what to write.
        folder: an empty folder.

    Raises:
        RequestError: no config, a family without Megatron's naming, or sizes that do not divide.
        ReleaseError: whatever reading and writing show.
    """
    from tasks.engine.families.megatron import NAMING, choose_names
    from tasks.engine.formats.readers import open_checkpoint
    from tasks.engine.planning.choose import choose_family
    from tasks.engine.planning.derive import derive_config
    from tasks.engine.planning.invert import invert_naming
    from tasks.engine.planning.megatron_ranks import RankLayout, plan_ranks
    from tasks.engine.planning.megatron_run import RunOf, arguments_of
    from tasks.engine.planning.planner import PlanRequest, make_plan
    from tasks.engine.planning.stated import check_stated
    from tasks.engine.writing.megatron import MegatronSave, compare_written, write_megatron
    from tasks.engine.writing.source_bytes import SourceBytes
    from tasks.reshard import describe_unknown, read_config

    reader = open_checkpoint(request.source, also=request.also, step=request.step, tag=request.tag)
    catalog = reader.catalog()
    assets = request.assets or next((root for root in (Path(catalog.root), request.source) if (root / "config.json").is_file()), None)
    config = read_config(assets) or derive_config(catalog.stated)
    choice = choose_family(request.family, config, keep_tied_head=False, describe=lambda _: describe_unknown(assets))
    family, dims, expected = choice.family, choice.dims, choice.expected
    naming = next((naming for naming in family.namings if naming.name == NAMING), None) if family else None
    if family is None or dims is None or expected is None or naming is None:
        raise RequestError("no rules say what Megatron calls this model's tensors", where="--family", remedy="Name a family that has them.")
    check_stated(catalog.stated, config, dims)
    asked = PlanRequest(family, dims, expected)
    plan = make_plan(catalog, asked)
    spec = request.spec or str(catalog.stated.get("spec", _SPEC))
    multiple = request.vocab_multiple or int(catalog.stated.get("vocab_multiple", _VOCAB_MULTIPLE))
    model = invert_naming(naming, expected, dims.sizes, dims.num_layers, partial(choose_names, spec=spec))
    layout = RankLayout(**request.ranks)
    stages = plan_ranks(model, layout, dims.num_layers, dims.sizes.get("num_experts", 0), multiple)
    args = arguments_of(RunOf(family.name, config, dims, layout, spec, multiple))
    source = SourceBytes(reader, catalog)
    try:
        write_megatron(source, plan, MegatronSave(layout, stages, args), folder)
        compare_written(folder, asked, source, plan)
    finally:
        source.files.close()
