"""Saying what a checkpoint is and holds. Imports neither torch nor Prefect."""

import json
from collections import Counter
from pathlib import Path

from flows.terminal import format_bytes
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.tensors.catalog import Catalog, SourceTensor

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
        tensors = {name: _describe_tensor(tensor) for name, tensor in catalog.tensors.items()}
        state = {key: {"kind": "tensor", **_describe_tensor(tensor)} for key, tensor in catalog.state_tensors.items()}
        state |= {item.fqn: {"kind": item.kind, "shape": item.shape, "dtype": item.dtype} for item in catalog.state}
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
    if not catalog.num_state_items:
        return "none"
    groups = Counter(item.fqn.split(".")[0] for item in catalog.state) + Counter(key.split("/")[0] for key in catalog.state_tensors)
    nbytes = sum(tensor.nbytes for tensor in catalog.state_tensors.values())
    listed = ", ".join(f"{name} x{n}" for name, n in sorted(groups.items()))
    return f"{catalog.num_state_items} items ({listed}), {format_bytes(nbytes)} of tensors"


def _describe_tensor(tensor: SourceTensor) -> dict[str, object]:
    return {"shape": tensor.shape, "dtype": tensor.dtype, "fragments": tensor.last - tensor.first}
