"""Showing what an export would write. No Prefect run, no tensor byte."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.export import prepare
from flows.requests import ExportRequest
from flows.run import PlainRunner, Run
from flows.terminal import format_bytes
from tasks.engine.planning.plan import ExportPlan, plan_from_json


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
    return Preview(plan, prepared.loaded.num_state, prepared.loaded.notes)


def print_plan(preview: Preview, *, as_json: bool) -> None:
    """Print what an export would write.

    Args:
        preview: the plan.
        as_json: whether to print a JSON summary instead.
    """
    plan = preview.plan
    if as_json:
        files: Mapping[str, object] = {file.name: {"nbytes": file.nbytes, "tensors": len(file.tensors)} for file in plan.files}
        dropped = [{"name": d.name, "because": d.because, "asked_by": d.asked_by} for d in plan.dropped]
        aliases = [{"name": a.name, "of": a.of, "because": a.because} for a in plan.aliases]
        head = {"digest": plan.digest, "format": plan.source.format, "family": plan.family, "naming": plan.naming, "nbytes": plan.nbytes}
        print(json.dumps({**head, "files": files, "dropped": dropped, "aliases": aliases, "notes": preview.notes}))
        return
    tensors = [tensor for _, tensor in plan.tensors()]
    print(f"source   {plan.source.root} ({plan.source.format}{'' if plan.source.step is None else f', step {plan.source.step}'})")
    print(f"family   {plan.family}, naming {plan.naming}")
    ops = Counter(tensor.op.name for tensor in tensors)
    casts = sum(tensor.encoding == "cast" for tensor in tensors)
    dtypes = Counter(tensor.dtype for tensor in tensors)
    print(f"tensors  {len(tensors)}: {', '.join(f'{d} x{n}' for d, n in sorted(dtypes.items()))}; {casts} cast")
    print(f"ops      {', '.join(f'{op} x{n}' for op, n in sorted(ops.items()))}")
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
