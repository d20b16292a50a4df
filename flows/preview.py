"""Showing what an export would write. No Prefect run, no tensor byte."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from flows.export import prepare
from flows.requests import ExportRequest
from flows.run import PlainRunner, Run
from reports.spell import format_bytes
from tasks.engine.planning.plan import ExportPlan, TensorPlan, plan_from_json
from tasks.engine.planning.quantize import name_roles, split_fusions
from validators.expectation import ITEMSIZE

_NEVER = "never quantized (head, router or embedding)"


@dataclass(frozen=True, slots=True)
class Preview:
    """A plan and the checkpoint it is for."""

    plan: ExportPlan
    state_items: int
    notes: tuple[str, ...]


def plan_export(request: ExportRequest, out: Path | None) -> Preview:
    """Plan an export and run the checks that need no tensor byte.

    Args:
        request: what to export; its destination plays no part.
        out: where to write the plan as JSON.

    Returns:
        The plan.

    Raises:
        ReleaseError: whatever the request, the assets or the source's metadata show.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("plan", Path(folder), PlainRunner())
        prepared = prepare(request, run)
        plan = plan_from_json(prepared.planned.path.read_text())
        if out is not None:
            shutil.copyfile(prepared.planned.path, out)
    unloadable = prepared.planned.unloadable
    split = split_fusions((tensor for _, tensor in plan.tensors()), plan.quantized) if plan.quantized else ()
    return Preview(plan, prepared.loaded.num_state, (*prepared.loaded.notes, *split, *((unloadable,) if unloadable else ())))


@dataclass(frozen=True, slots=True)
class EncodedSize:
    """Tensors of one encoding: how many, what they take, and what they take in the source. A quantized weight counts once."""

    encoding: str
    tensors: int
    nbytes: int
    source_nbytes: int


def encoded_sizes(plan: ExportPlan) -> tuple[EncodedSize, ...]:
    """Return how much of a release is stored in which encoding: quantized ones by name, other tensors by dtype.

    Args:
        plan: the release.

    Returns:
        Sorted by name.
    """
    weights: dict[str, dict[str, int]] = {}
    nbytes = Counter[str]()
    for _, tensor in plan.tensors():
        name = _stored_as(tensor)
        nbytes[name] += tensor.spec.nbytes
        source = sum(prod(box.shape) * ITEMSIZE[box.dtype] for box in tensor.inputs)
        weights.setdefault(name, {})[tensor.part.weight if tensor.part else tensor.name] = source
    return tuple(EncodedSize(name, len(held), nbytes[name], sum(held.values())) for name, held in sorted(weights.items()))


def _stored_as(tensor: TensorPlan) -> str:
    return tensor.encoding if tensor.part else tensor.dtype


def print_plan(preview: Preview, *, as_json: bool) -> None:
    """Print what an export would write.

    Args:
        preview: the plan.
        as_json: whether to print a JSON summary instead.
    """
    plan = preview.plan
    if as_json:
        print(json.dumps(_summary(preview)))
        return
    tensors = [tensor for _, tensor in plan.tensors()]
    print(f"source   {plan.source.root} ({plan.source.format}{'' if plan.source.step is None else f', step {plan.source.step}'})")
    print(f"family   {plan.family}, naming {plan.naming}")
    ops = Counter(tensor.op.name for tensor in tensors)
    casts = sum(tensor.encoding == "cast" for tensor in tensors)
    dtypes = Counter(_stored_as(tensor) if plan.is_gguf else tensor.dtype for tensor in tensors)
    print(f"tensors  {len(tensors)}: {', '.join(f'{d} x{n}' for d, n in sorted(dtypes.items()))}; {casts} cast")
    print(f"ops      {', '.join(f'{op} x{n}' for op, n in sorted(ops.items()))}")
    for size in encoded_sizes(plan):
        share = f"{format_bytes(size.nbytes)} from {format_bytes(size.source_nbytes)}"
        print(f"stored   {size.encoding}: {size.tensors} tensors, {share}")
    for line in _whole_lines(plan):
        print(f"{'finer' if plan.is_gguf else 'whole':<9}{line}")
    for file in plan.files:
        print(f"file     {file.name}  {format_bytes(file.nbytes)}  {len(file.tensors)} tensors")
    for alias in plan.aliases:
        print(f"left out {alias.name}: {alias.because} (their equality is checked)")
    for drop in plan.dropped:
        print(f"left out {drop.name}: {drop.because}")
    if preview.state_items:
        print(f"left out training state, {preview.state_items} items")
    for note in preview.notes:
        print(f"note     {note}")
    print(f"digest   {plan.digest}")


def _whole_lines(plan: ExportPlan) -> Iterator[str]:
    # A line for every role and reason; what no request could quantize comes last.
    if plan.quantized is None:
        return
    whole = {kept.name: kept.because for kept in plan.quantized.whole}
    matrices = [tensor for _, tensor in plan.tensors() if tensor.part is None and len(tensor.shape) == 2 and not plan.is_gguf]
    never = {tensor.name: _NEVER for tensor in matrices if tensor.name not in whole}
    yield from (f"{names}: {because}" for names, because in name_roles(whole | never))


def _summary(preview: Preview) -> Mapping[str, object]:
    plan = preview.plan
    return {
        "digest": plan.digest,
        "format": plan.source.format,
        "family": plan.family,
        "naming": plan.naming,
        "nbytes": plan.nbytes,
        "files": {file.name: {"nbytes": file.nbytes, "tensors": len(file.tensors)} for file in plan.files},
        "dropped": [{"name": d.name, "because": d.because, "asked_by": d.asked_by} for d in plan.dropped],
        "aliases": [{"name": a.name, "of": a.of, "because": a.because} for a in plan.aliases],
        "encodings": {
            s.encoding: {"tensors": s.tensors, "nbytes": s.nbytes, "source_nbytes": s.source_nbytes} for s in encoded_sizes(plan)
        },
        "whole": [{"name": w.name, "because": w.because} for w in plan.quantized.whole] if plan.quantized else [],
        "notes": preview.notes,
    }
