"""First planning step: every source tensor gets its global shape, and its fragments are proven to tile it."""

from collections.abc import Mapping
from dataclasses import dataclass

from reports.errors import CoverageError, FormatError, name_some
from tasks.engine.tensors.catalog import Catalog
from tasks.engine.tensors.ops import EXPERT, Shape
from tasks.engine.tensors.rules import Drop, Naming
from validators.expectation import TensorSpec


@dataclass(frozen=True, slots=True)
class Model:
    """What the planner knows of the model: the naming that fits, the released shapes, and the sizes ops need."""

    family: str
    naming: Naming
    shapes: Mapping[str, Shape]
    sizes: Mapping[str, int]


def plan_merge(catalog: Catalog, model: Model, dropped: frozenset[str]) -> dict[str, TensorSpec]:
    """Return every source tensor with its global shape, after proving that its fragments tile it.

    A shape comes from the writer's metadata; where the format records none, from the config: the op's inverse on the released shapes.

    Args:
        catalog: the checkpoint.
        model: names and sizes.
        dropped: sources that will not be read; their fragments are not judged.

    Returns:
        Specs by source name, in the catalog's order. Sources of unknown shape that nothing maps are left to `plan_renames`.

    Raises:
        CoverageError: holes or overlaps; the message lists the first tensors concerned and says how many there are.
        FormatError: a shape is in neither the checkpoint nor the config.
    """
    specs: dict[str, TensorSpec] = {}
    broken: list[CoverageError] = []
    shapeless: list[str] = []
    for name, tensor in catalog.tensors.items():
        if name in dropped:
            continue
        shape = tensor.shape if tensor.shape is not None else _shape_from_config(name, model)
        if shape is None:
            shapeless.append(name)
            continue
        try:
            catalog.check_coverage(name, shape)
        except CoverageError as error:
            broken.append(error)
        specs[name] = TensorSpec(name, shape, tensor.dtype)
    if broken:
        first = broken[0]
        others = f" So are parts of {name_some(e.where for e in broken[1:])}." if len(broken) > 1 else ""
        raise CoverageError(f"{first.what}.{others}", where=first.where, remedy=first.remedy)
    known = [name for name in shapeless if model.naming.match(name) is not None]
    if known:
        raise FormatError(
            f"{catalog.format} does not record global shapes, and the config implies none for {name_some(known)}",
            where=catalog.root,
            remedy="Give the model's config.json with --assets and a family that knows these tensors.",
        )
    return specs


def _shape_from_config(name: str, model: Model) -> Shape | None:
    match = model.naming.match(name)
    if match is None or isinstance(match.row, Drop):
        return None
    shapes = [model.shapes.get(target.replace(EXPERT, "0")) for target in match.targets]
    if any(shape is None for shape in shapes):
        return None
    return match.row.op.source_shape([shape for shape in shapes if shape is not None], model.sizes)
