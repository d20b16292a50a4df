"""Saying what a checkpoint is and holds. Imports neither torch nor Prefect."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import disk_usage

from reports.moment import Moment
from reports.spell import format_bytes
from tasks.drill_history import find_export, find_passed
from tasks.engine.formats.folders import step_of
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.restoring.facts import gather_facts
from tasks.engine.tensors.catalog import Catalog, SourceTensor
from tasks.moments import moment_of
from tasks.saves import list_saves
from validators.drills.inventory import Component, take_inventory
from validators.drills.layout import Layout, RankRow, read_layout
from validators.drills.log import read_goals
from validators.drills.readiness import Answer, Declared, Surroundings, answer_readiness

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds, its place in the run, its training-state inventory, its ranks, and the readiness checklist answered."""

    catalog: Catalog
    moment: Moment
    inventory: tuple[Component, ...]
    layout: Layout
    answers: tuple[Answer, ...]


def inspect_checkpoint(source: Path, also: tuple[Path, ...], step: int | None, tag: str, runs: Path, goals: Path | None) -> Inspection:
    """Return what a checkpoint holds.

    Args:
        source: its folder, or a run's root.
        also: more roots of the same save.
        step: which step of a run's root.
        tag: which save of a folder that holds several.
        runs: where run folders are, for the history of drills.
        goals: the drill's YAML, for what the run's owner declares; None when there is none.

    Returns:
        The inspection.

    Raises:
        FormatError: not a checkpoint, or an incomplete one.
        RequestError: the goals are malformed.
    """
    declared = read_goals(goals).declared if goals is not None else Declared()
    reader = open_checkpoint(source.absolute(), also=[path.absolute() for path in also], step=step, tag=tag)
    facts = gather_facts(reader)
    answers = answer_readiness(facts, _look_around(Path(facts.root), runs, declared))
    return Inspection(reader.catalog(), moment_of(facts.step, facts.values), take_inventory(facts), read_layout(facts), answers)


def _look_around(checkpoint: Path, runs: Path, declared: Declared) -> Surroundings:
    beside = list_saves(checkpoint.parent if step_of(checkpoint) is not None else checkpoint)
    kept = tuple(save.name for save in beside.complete())
    nbytes = next((save.nbytes for save in beside.saves if checkpoint.is_relative_to(save.path)), 0)
    passed = find_passed(runs, checkpoint)
    last = f"{passed.finished}, level {passed.level} ({passed.run_id})" if passed else ""
    exported = find_export(runs, beside.root)
    free, told = disk_usage(checkpoint).free, exported and f"{exported} was green"
    return Surroundings(kept, beside.interval_seconds(), nbytes, free, last, told, declared)


def print_inspection(inspection: Inspection, *, as_json: bool) -> None:
    """Print what a checkpoint holds.

    Args:
        inspection: the checkpoint.
        as_json: whether to print every tensor as JSON instead.
    """
    catalog = inspection.catalog
    if as_json:
        print(json.dumps(_as_json(inspection)))
        return
    _print_catalog(catalog, inspection.moment)
    print("training state")
    for part in inspection.inventory:
        print(f"         {part.name:<22} {part.presence:<9}  {': '.join(filter(None, (part.where, part.detail)))}")
    _print_ranks(inspection.layout)
    print("readiness")
    for answer in inspection.answers:
        print(f"         {answer.question}  {answer.answer} ({answer.evidence})")


def _as_json(inspection: Inspection) -> dict[str, object]:
    catalog = inspection.catalog
    tensors = {name: _describe_tensor(tensor) for name, tensor in catalog.tensors.items()}
    state = {key: {"kind": "tensor", **_describe_tensor(tensor)} for key, tensor in catalog.state_tensors.items()}
    state |= {item.fqn: {"kind": item.kind, "shape": item.shape, "dtype": item.dtype} for item in catalog.state}
    head = {"format": catalog.format, "root": catalog.root, **asdict(inspection.moment), "digest": catalog.digest, "notes": catalog.notes}
    inventory = [asdict(part) for part in inspection.inventory]
    layout, answers = asdict(inspection.layout), [asdict(answer) for answer in inspection.answers]
    return {**head, "tensors": tensors, "state": state, "inventory": inventory, "layout": layout, "readiness": answers}


def _print_catalog(catalog: Catalog, moment: Moment) -> None:
    known = [t for t in catalog.tensors.values() if t.shape is not None]
    print(f"{catalog.root}")
    print(f"format   {', '.join(filter(None, (catalog.format, moment.spell())))}")
    dtypes = Counter(t.dtype for t in catalog.tensors.values())
    nbytes = sum(t.nbytes for t in known)
    print(f"model    {len(catalog.tensors)} tensors, {format_bytes(nbytes)}, {', '.join(f'{d} x{n}' for d, n in sorted(dtypes.items()))}")
    for tensor in list(catalog.tensors.values())[:_SHOWN]:
        shape = "shape not recorded" if tensor.shape is None else " x ".join(map(str, tensor.shape)) or "scalar"
        print(f"         {tensor.fqn}  {tensor.dtype}  {shape}  in {tensor.last - tensor.first} fragments")
    if len(catalog.tensors) > _SHOWN:
        print(f"         … and {len(catalog.tensors) - _SHOWN} more; --json lists all")
    print(f"state    {_describe_state(catalog)}")
    for note in catalog.notes:
        print(f"note     {note}")


def _print_ranks(layout: Layout) -> None:
    told = [row for row in layout.ranks if row.coordinates]
    if told:
        print(f"ranks    {layout.spell()}")
    for row in told[:_SHOWN]:
        print(f"         {_describe_rank(row)}")
    if len(told) > _SHOWN:
        print(f"         … and {len(told) - _SHOWN} more; --json lists all")


def _describe_rank(row: RankRow) -> str:
    coordinates = " ".join(f"{axis} {position}" for axis, position in row.coordinates.items())
    return f"{row.rank:<4} {coordinates}" + (f"  in {row.files}" if row.files else "")


def _describe_state(catalog: Catalog) -> str:
    if not catalog.num_state_items:
        return "none"
    groups = Counter(item.fqn.split(".")[0] for item in catalog.state) + Counter(key.split("/")[0] for key in catalog.state_tensors)
    nbytes = sum(tensor.nbytes for tensor in catalog.state_tensors.values())
    listed = ", ".join(f"{name} x{n}" for name, n in sorted(groups.items()))
    return f"{catalog.num_state_items} items ({listed}), {format_bytes(nbytes)} of tensors"


def _describe_tensor(tensor: SourceTensor) -> dict[str, object]:
    return {"shape": tensor.shape, "dtype": tensor.dtype, "fragments": tensor.last - tensor.first}
