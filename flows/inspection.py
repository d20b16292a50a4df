"""Saying what a checkpoint is and holds. Imports neither torch nor Prefect."""

import json
from collections import Counter
from math import prod
from pathlib import Path

from flows.terminal import format_bytes
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.tensors.catalog import Catalog
from validators.expectation import ITEMSIZE

_SHOWN = 12


def inspect_checkpoint(source: Path, also: tuple[Path, ...], step: int | None) -> Catalog:
    """Return what a checkpoint holds.

    Args:
        source: its folder, or a run's root.
        also: more roots of the same save.
        step: which step of a run's root.

    Returns:
        The catalog.

    Raises:
        FormatError: not a checkpoint, or an incomplete one.
    """
    return open_checkpoint(source.absolute(), also=[path.absolute() for path in also], step=step).catalog()


def print_inspection(catalog: Catalog, *, as_json: bool) -> None:
    """Print what a checkpoint holds.

    Args:
        catalog: the checkpoint.
        as_json: whether to print every tensor as JSON instead.
    """
    if as_json:
        tensors = {n: {"shape": t.shape, "dtype": t.dtype, "fragments": t.last - t.first} for n, t in catalog.tensors.items()}
        state = {item.fqn: {"kind": item.kind, "shape": item.shape, "dtype": item.dtype} for item in catalog.state}
        head = {"format": catalog.format, "root": catalog.root, "step": catalog.step, "digest": catalog.digest, "notes": catalog.notes}
        print(json.dumps({**head, "tensors": tensors, "state": state}))
        return
    known = [t for t in catalog.tensors.values() if t.shape is not None]
    print(f"{catalog.root}")
    print(f"format   {catalog.format}" + ("" if catalog.step is None else f", step {catalog.step}"))
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


def _describe_state(catalog: Catalog) -> str:
    if not catalog.state:
        return "none"
    groups = Counter(item.fqn.split(".")[0] for item in catalog.state)
    nbytes = sum(prod(item.shape) * ITEMSIZE.get(item.dtype, 0) for item in catalog.state if item.kind == "tensor")
    return (
        f"{len(catalog.state)} items ({', '.join(f'{name} x{n}' for name, n in sorted(groups.items()))}), {format_bytes(nbytes)} of tensors"
    )
