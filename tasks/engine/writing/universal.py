"""A ZeRO save as a universal checkpoint, from which DeepSpeed goes on at another world size.

    DIR/<tag>_universal/zero/<parameter>/fp32.pt, one file per moment, step.pt
    DIR/<tag>_universal/zero/optimizer_state.pt      the parameter groups' settings
    DIR/<tag>_universal/*_model_states.pt            copies, with the layers' and experts' files
    DIR/latest_universal

As DeepSpeed's own tool does, tensors keep their shape when they come from ZeRO-1 or -2, and are flat from ZeRO-3, which is what each stage
loads. Beyond that tool: frozen weights of ZeRO-3, experts, and the step of ZeRO-3 are there. Left behind is the loss scale of fp16 runs,
which is an object of DeepSpeed's; it starts again from its configured value.

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py; runtime/base_optimizer.py and zero/stage3.py (loading).
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch

from reports.errors import FormatError, ReplicaError
from tasks.engine.containers.torch_writer import write_tensor
from tasks.engine.encodings.cast import encode_cast
from tasks.engine.formats.folders import FoundFile
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.formats.universal import FP32, OPTIMIZER_STATE
from tasks.engine.formats.zero import Anatomy, ZeroReader
from tasks.engine.formats.zero_names import LATEST_UNIVERSAL
from tasks.engine.formats.zero_states import read_plain_fields
from tasks.engine.planning.plan import Input
from tasks.engine.tensors.catalog import OTHER_SLOT, Catalog
from tasks.engine.tensors.ops import Raw
from tasks.engine.writing.crc import CrcPiece, RecordedCrc, verify_pieces
from tasks.engine.writing.source_bytes import SourceBytes
from validators.expectation import ITEMSIZE

BAND_NBYTES = 4 << 20
MASTER, STEP = "F32", "step"


def write_universal(reader: ZeroReader, folder: Path) -> Path:
    """Write a universal checkpoint into a new folder, and prove it by reading it back.

    Args:
        reader: the save.
        folder: an empty folder.

    Returns:
        The checkpoint's folder inside it.

    Raises:
        FormatError: a source file is damaged, or the save has no optimizer files, or tensor-parallel ranks.
        ReplicaError: what was written is not what was read.
        OSError: the disk is full or failing.
    """
    catalog, anatomy = reader.catalog(), reader.anatomy()
    if anatomy.optimizer is None:
        raise FormatError("has no optimizer files, so there is no training state to go on from", where=catalog.root)
    if anatomy.tp_degree > 1:
        raise FormatError(
            f"is of {anatomy.tp_degree} tensor-parallel ranks",
            where=catalog.root,
            remedy="Universal checkpoints are written from saves without tensor parallelism; use DeepSpeed's ds_to_universal.",
        )
    source, pieces, slots = SourceBytes(reader, catalog), _Pieces(), _slots(catalog)
    made = folder / f"{anatomy.tag}_universal"
    try:
        for name in (*(name for group in anatomy.groups for name in group), *anatomy.frozen):
            keys = {FP32: name, **slots.get(name, {})}
            _write_parameter(source, keys, made / "zero" / anatomy.written[name], pieces, flat=anatomy.sharded)
        verify_pieces(pieces.recorded.values(), pieces.read, source.read_crc)
        torch.save(_optimizer_state(source, anatomy, anatomy.optimizer), made / "zero" / OPTIMIZER_STATE)
        for file in anatomy.weights:
            shutil.copyfile(file.absolute, made / file.name)
        (folder / LATEST_UNIVERSAL).write_text(made.name)
        _compare(source, made)
    finally:
        source.files.close()
    return made


@dataclass(slots=True)
class _Pieces:
    # Checksums of what was read, and those that the writer recorded.
    read: list[CrcPiece] = field(default_factory=list)
    recorded: dict[tuple[str, int], RecordedCrc] = field(default_factory=dict)


def _slots(catalog: Catalog) -> dict[str, dict[str, str]]:
    # Parameter → slot → key of the state tensor.
    found: dict[str, dict[str, str]] = {}
    for key in catalog.state_tensors:
        slot, _, name = key.partition("/")
        if slot != STEP:
            found.setdefault(name, {})[slot] = key
    return found


def _write_parameter(source: SourceBytes, keys: Mapping[str, str], folder: Path, pieces: _Pieces, *, flat: bool) -> None:
    folder.mkdir(parents=True)
    for slot, key in keys.items():
        tensor = source.catalog.tensor(key)
        shape = tensor.shape or ()
        for fragment in source.catalog.fragments(key):
            recorded = source.recorded(fragment)
            if recorded is not None:
                pieces.recorded[recorded.path, recorded.start] = recorded
        code = MASTER if slot == FP32 else tensor.dtype
        chunks = (rows.reshape(-1).view(np.uint8).data for rows in _bands(source, key, code, pieces.read))
        if flat:
            write_tensor(folder / f"{slot}.pt", code, (prod(shape),), chunks)
        else:
            write_tensor(folder / f"{slot}.pt", code, shape, chunks, key="param", cat_dim=0)
    step = _step_of(source, keys[FP32])
    if step is not None:
        torch.save(torch.tensor(float(step)), folder / f"{STEP}.pt")


def _bands(source: SourceBytes, key: str, code: str, read: list[CrcPiece]) -> Iterator[Raw]:
    # The values of a tensor in bands of rows, as floats of dtype `code`.
    tensor = source.catalog.tensor(key)
    shape = tensor.shape or ()
    box = Input(key, (0,) * len(shape), shape, tensor.dtype, shape)
    count = max(1, BAND_NBYTES // max(1, prod(shape[1:]) * ITEMSIZE[tensor.dtype]))
    for start in range(0, shape[0] if shape else 1, count):
        rows = np.ascontiguousarray(source.read_rows(box, 0, range(start, min(start + count, shape[0] if shape else 1)), read))
        yield rows if tensor.dtype == code else encode_cast(key, rows, tensor.dtype, code)[0]


def _step_of(source: SourceBytes, name: str) -> float | None:
    key = slot_key(STEP, name)
    if key in source.catalog.state_tensors:
        (rows,) = _bands(source, key, MASTER, [])
        return float(rows.view(np.float32).reshape(()))
    held = (item.value for item in source.catalog.state if item.fqn == key and isinstance(item.value, int))
    return next(held, None)  # DeepSpeed's own optimizers keep a number


def _optimizer_state(source: SourceBytes, anatomy: Anatomy, optimizer: FoundFile) -> dict[str, object]:
    plain, settings = read_plain_fields(optimizer)
    if not anatomy.sharded:
        return {**plain, "param_groups": settings}
    steps = {number: _step_of(source, group[0]) for number, group in enumerate(anatomy.groups)}
    state = {number: {STEP: torch.tensor(float(step))} for number, step in steps.items() if step is not None}
    return {**plain, "param_groups": settings, "optimizer_state_dict": {"state": state, "param_groups": settings}}


def _compare(source: SourceBytes, made: Path) -> None:
    # Every tensor of the save, read back: weights, moments and steps, bit for bit.
    reader = open_checkpoint(made)
    written = SourceBytes(reader, reader.catalog())
    keys = (*source.catalog.tensors, *(key for key in source.catalog.state_tensors if not key.startswith(f"{OTHER_SLOT}/")))
    for key in keys:
        found = written.catalog.tensors.get(key) or written.catalog.state_tensors.get(key)
        if found is None or found.shape != source.catalog.tensor(key).shape:
            raise ReplicaError("is not in what was written, or in another shape", where=key, remedy=_FAULT)
        pairs = zip(_bands(source, key, found.dtype, []), _bands(written, key, found.dtype, []), strict=True)
        if not all(np.array_equal(ours, theirs) for ours, theirs in pairs):
            raise ReplicaError("differs in what was written", where=key, remedy=_FAULT)
    written.files.close()


_FAULT = "Write it again; if this repeats, the disk or the product is at fault."
