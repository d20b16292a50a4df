"""Weights as a legacy Megatron save: one `model_optim_rng.pt` per rank, as `--ckpt-format torch` lays them out.

    DIR/latest_checkpointed_iteration.txt           "release": weights without a training state
    DIR/release/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Each tensor is put together once and cut for all ranks of its stage; no more than one is in memory. Rows that pad the vocabulary are zero.
What was written is read back and compared with the source, bit for bit.
"""

import hashlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np
import torch

from reports.errors import ReplicaError
from tasks.engine.containers.torch_writer import Later, StateWriter
from tasks.engine.formats.megatron_files import MODEL_FILE
from tasks.engine.formats.megatron_state import RELEASE, TRACKER
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.invert import Inverse
from tasks.engine.planning.megatron_ranks import RankLayout, Share, StagePlan
from tasks.engine.planning.plan import ExportPlan, TensorPlan
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.tensors.ops import Raw, apply_op
from tasks.engine.tensors.region import Region
from tasks.engine.writing.crc import CrcPiece, RecordedCrc, verify_pieces
from tasks.engine.writing.source_bytes import SourceBytes
from validators.expectation import ITEMSIZE

_BAND_NBYTES = 8 << 20
_CHECKPOINT_VERSION = 3.0
_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")  # which save an extra state, None without FP8
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class MegatronSave:
    """What is written: per (pipeline stage, virtual stage) what the ranks hold, and the run's arguments."""

    layout: RankLayout
    stages: Mapping[tuple[int, int], StagePlan]
    args: Mapping[str, object]


def write_megatron(source: SourceBytes, plan: ExportPlan, save: MegatronSave, folder: Path) -> None:
    """Write a legacy save.

    Args:
        source: a checkpoint.
        plan: the published tensors as they are made of it.
        save: who holds what.
        folder: an empty folder.

    Raises:
        FormatError: a source file is damaged.
        OSError: the disk is full or failing.
    """
    values = _Published(source, plan)
    for pp in range(save.layout.pp):
        chunks = [save.stages[pp, chunk] for chunk in range(save.layout.vpp)]
        with ExitStack() as stack:
            writers = {}
            for tp, ep in save.layout.files():
                inside = folder / RELEASE / save.layout.folder(tp, pp, ep)
                inside.mkdir(parents=True)
                held = _content(chunks, (tp, ep), values, save.args)
                writers[tp, ep] = stack.enter_context(StateWriter(inside / MODEL_FILE, held))
            for chunk in chunks:
                for tensor in chunk.tensors:
                    whole = values.assemble(tensor)
                    for pair, writer in writers.items():
                        share = chunk.shares[pair].get(tensor.name)
                        if share is not None:
                            writer.write(_bytes_of(whole, share))
    values.verify()
    (folder / TRACKER).write_text(RELEASE)


def compare_written(folder: Path, request: PlanRequest, source: SourceBytes, plan: ExportPlan) -> None:
    """Prove what was written: read back as any checkpoint is, every published tensor has the source's bits.

    Args:
        folder: what `write_megatron` wrote.
        request: how the plan was asked for.
        source: the checkpoint it was made of.
        plan: the plan.

    Raises:
        ReplicaError: something differs.
    """
    reader = open_checkpoint(folder)
    catalog = reader.catalog()
    found = SourceBytes(reader, catalog)
    ours, theirs = _Published(source, plan), _Published(found, make_plan(catalog, request))
    try:
        for name, tensor in ours.tensors.items():
            if tensor.dtype != theirs.tensors[name].dtype or ours.digest(tensor) != theirs.digest(theirs.tensors[name]):
                raise ReplicaError(
                    "differs in what was written",
                    where=name,
                    remedy="Write it again; if this repeats, the disk or the product is at fault.",
                )
    finally:
        found.files.close()


class _Published:
    # The published tensors of a plan, and checksums of what is read of the source.
    def __init__(self, source: SourceBytes, plan: ExportPlan) -> None:
        self.tensors: Mapping[str, TensorPlan] = {tensor.name: tensor for _, tensor in plan.tensors()}
        self._source = source
        self._read: list[CrcPiece] = []

    @property
    def main_dtype(self) -> str:
        # That of most values; a router's bias may differ.
        numel = dict.fromkeys(_DTYPES, 0)
        for tensor in self.tensors.values():
            numel[tensor.dtype] = numel.get(tensor.dtype, 0) + prod(tensor.shape)
        return max(numel, key=lambda dtype: numel[dtype])

    def dtype_of(self, tensor: Inverse) -> str:
        return next(self.tensors[piece.target].dtype for piece in tensor.pieces if piece.target)

    def bands(self, tensor: TensorPlan) -> Iterator[Raw]:
        for band in self._source.bands(tensor, _BAND_NBYTES, self._read):
            yield np.ascontiguousarray(apply_op(tensor.op, band))

    def digest(self, tensor: TensorPlan) -> bytes:
        # Of the values in order: bands of one tensor begin elsewhere in another checkpoint.
        made = hashlib.sha256()
        for band in self.bands(tensor):
            made.update(band.reshape(-1).view(np.uint8).data)
        return made.digest()

    def assemble(self, tensor: Inverse) -> Raw:
        whole = np.zeros(tensor.shape, dtype=f"u{ITEMSIZE[self.dtype_of(tensor)]}")
        for piece in tensor.pieces:
            if not piece.target:
                continue
            values = np.concatenate([np.atleast_1d(band) for band in self.bands(self.tensors[piece.target])]).reshape(piece.shape)
            joined = apply_op(piece.call, values) if piece.call.name == "transpose" else values  # its own inverse
            at = 0
            for box in piece.boxes:
                whole[box.within(Region.whole(tensor.shape))] = joined[at : at + box.shape[0]]
                at += box.shape[0]
        return whole

    def verify(self) -> None:
        recorded: dict[tuple[str, int], RecordedCrc] = {}
        for tensor in self.tensors.values():
            for box in tensor.inputs:
                for fragment in self._source.overlapping(box.name, box.region):
                    found = self._source.recorded(fragment)
                    if found is not None:
                        recorded[found.path, found.start] = found
        verify_pieces(recorded.values(), self._read, self._source.read_crc)


def _content(chunks: Sequence[StagePlan], pair: tuple[int, int], values: _Published, args: Mapping[str, object]) -> dict[str, object]:
    models = [_chunk_content(chunk, pair, values) for chunk in chunks]
    dtype = _DTYPES[values.main_dtype]
    floats = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    keys = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    return {
        "args": Namespace(**args, **floats),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        **dict(zip(keys, models, strict=True)),
    }


def _chunk_content(chunk: StagePlan, pair: tuple[int, int], values: _Published) -> dict[str, object]:
    # Behind each linear's tensors stands its extra state; a tied head has one too, whose weight is the embedding.
    shares = [(tensor, share) for tensor in chunk.tensors if (share := chunk.shares[pair].get(tensor.name)) is not None]
    held: dict[str, object] = {}
    for module, own in groupby(shares, key=lambda entry: entry[1].name.rpartition(".")[0]):
        held |= {share.name: Later(values.dtype_of(tensor), share.shape) for tensor, share in own}
        if module.rpartition(".")[2] in _LINEARS:
            held[f"{module}._extra_state"] = None
    if any(name.startswith("decoder.final_layernorm.") for name in held):
        held.setdefault("output_layer._extra_state", None)
    return held


def _bytes_of(whole: Raw, share: Share) -> Iterator[memoryview]:
    for box in share.boxes:
        part = np.ascontiguousarray(whole[box.within(Region.whole(whole.shape))])
        yield part.reshape(-1).view(np.uint8).data
