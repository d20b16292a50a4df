"""What Megatron-LM's ranks wrote in the legacy format (`--ckpt-format torch`): tensor, pipeline, virtual-pipeline and expert parallel.

Every rank's part becomes boxes of global tensors, called by Megatron's own names with global layer and expert numbers, so that one naming
per family fits both of Megatron's formats. What several ranks hold (norms, dense weights beside other experts, the embedding's second
copy) is read once and compared bit by bit.

Refused: see megatron_args, megatron_files, megatron_names and megatron_cuts.

Source: Megatron-LM core 0.12 to main, megatron/training/checkpointing.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor
from tasks.engine.formats.folders import digest_files, list_names
from tasks.engine.formats.megatron_args import REMEDY
from tasks.engine.formats.megatron_cuts import Part, Whole, is_expert, place_part
from tasks.engine.formats.megatron_facts import stated_facts
from tasks.engine.formats.megatron_files import RankFile, Ranks, list_rank_folders, open_ranks
from tasks.engine.formats.megatron_names import check_experts, globalise, number_layers, unify
from tasks.engine.formats.megatron_optimizer import RankState, read_optimizer
from tasks.engine.formats.megatron_state import RELEASE, RESUMED, read_tracker, state_items, tracker_notes
from tasks.engine.formats.megatron_writers import refuse_exchanged
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.formats.reader import CheckpointReader, Payload, Probe, Source
from tasks.engine.formats.torch_files import TorchTensors
from tasks.engine.tensors.catalog import Catalog, Fragment, Locator, SourceTensor, TableBuilder
from tasks.engine.tensors.region import Region


class MegatronReader(CheckpointReader):
    """Reads one legacy save of Megatron-LM.

    Args:
        source: an iteration's folder, or a run's root whose tracker says "release"; and the other nodes' roots.
    """

    name: ClassVar[str] = "megatron"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._tensors = TorchTensors()

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` holds the rank folders of a save.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        if list_rank_folders(path):
            return Probe(True, "it has mp_rank_* folders")
        if _has_release(path):
            return Probe(True, "release/ has mp_rank_* folders")
        return Probe(False, "no mp_rank_* folder")

    def _locate(self, fragment: Fragment) -> Payload:
        return self._tensors.payload(fragment)

    def _make_catalog(self) -> Catalog:
        source = self._source
        inner = "" if list_rank_folders(source.path) else RELEASE
        where = str(source.path / inner)
        ranks = open_ranks(source, inner)
        refuse_exchanged(ranks.files, ranks.layout, where)
        builder = TableBuilder()
        tensors, replicas = {}, []
        for name, held in collect_pieces(ranks, where, {file.folder: Held(file, file.chunks) for file in ranks.files}).items():
            tensors[name], copies = self._add(builder, name, held)
            replicas += copies
        states = [read_optimizer(file, source, inner) for file in ranks.files]
        state_tensors = dict(self._add_state(builder, ranks, where, states))
        found = {file.name: file for file in (*(file.found for file in ranks.files), *(state.file.found for state in states))}
        first = ranks.files[0]
        step = first.rest.get("iteration")
        return Catalog(
            self.name,
            str(source.path.absolute()),
            step if type(step) is int else None,
            MappingProxyType(tensors),
            builder.build(),
            tuple(state_items(ranks)),
            digest_files([file.archive.read("data.pkl") for file in ranks.files], found.values()),
            sum(file.nbytes for file in found.values()),
            tuple(replicas),
            (*source.notes, *tracker_notes(source.path / inner, step), *_state_notes(states)),
            MappingProxyType(state_tensors),
            stated=MappingProxyType(stated_facts(first.args)),
        )

    def _add_state(
        self, builder: TableBuilder, ranks: Ranks, where: str, states: Sequence[RankState]
    ) -> Iterator[tuple[str, SourceTensor]]:
        # Slot by slot; where one rank's cannot be decoded, no rank's are shown. Copies on other ranks are the same run's, and not listed.
        if any(state.why_not for state in states):
            return
        for slot in dict.fromkeys(slot for state in states for slot in state.slots):
            held = {state.file.folder: Held(state.file, state.slots.get(slot, ())) for state in states}
            for name, pieces in collect_pieces(ranks, where, held).items():
                key = slot_key(slot, name)
                yield key, self._add(builder, key, pieces)[0]

    def _add(self, builder: TableBuilder, name: str, held: Sequence["Piece"]) -> tuple[SourceTensor, list[Fragment]]:
        # The first rank's box of each region becomes a row, the others' replicas.
        first, shape, dtype = builder.nrows, held[0].shape, held[0].part.tensor.dtype
        rows: dict[tuple[int, ...], Piece] = {}
        replicas = []
        for piece in held:
            if (piece.shape, piece.part.tensor.dtype) != (shape, dtype):
                raise FormatError(
                    f"{name} is {piece.part.tensor.dtype} {piece.shape} by {piece.file.folder}, {dtype} {shape} by {held[0].file.folder}",
                    where=piece.file.found.absolute,
                    remedy=REMEDY,
                )
            offset, extent = piece.part.region.offset, piece.part.region.shape
            path = piece.file.found.path
            code, start, nbytes = self._tensors.add(path, name, offset, piece.file.archive, piece.part.tensor)
            if offset in rows:
                replicas.append(Fragment(name, piece.part.region, code, Locator(path, start, nbytes), -1))
                continue
            rows[offset] = piece
            builder.add(offset, extent, path, start, nbytes)
        return SourceTensor(name, shape, DTYPES[dtype], first, builder.nrows), replicas


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a kind (weights, or one slot of the optimizer): a mapping per chunk, and the file they lie in."""

    file: RankFile
    chunks: Sequence[Mapping[str, StoredTensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a global tensor, in one rank's file; `shape` is the whole's by this rank's account."""

    file: RankFile
    shape: tuple[int, ...]
    part: Part


def collect_pieces(ranks: Ranks, where: str, held: Mapping[str, Held]) -> Mapping[str, Sequence[Piece]]:
    """Return what the ranks hold of each global tensor.

    Args:
        ranks: all files.
        where: the save, for messages.
        held: what is to be placed, by rank folder.

    Returns:
        Global name → boxes, by coordinates; names in the order of virtual stages, then pipeline stages.

    Raises:
        FormatError: names, counts or shapes that no run of Megatron has.
    """
    starts = number_layers(ranks, where)
    made: dict[str, list[Piece]] = {}
    for chunk in range(max(len(file.chunks) for file in ranks.files)):
        for file in ranks.files:
            own = held[file.folder]
            tensors = own.chunks[chunk] if chunk < len(own.chunks) else {}
            for name, whole in _wholes(own.file, tensors, starts[file.pp, chunk], ranks):
                made.setdefault(name, []).extend(Piece(own.file, whole.shape, part) for part in whole.parts)
    return made


def _wholes(file: RankFile, chunk: Mapping[str, StoredTensor], first_layer: int, ranks: Ranks) -> Iterator[tuple[str, Whole]]:
    layout, where = ranks.layout, file.found.absolute
    per_rank = layout.num_experts // layout.ep
    tensors = unify(chunk, per_rank, where)
    check_experts(list(tensors), per_rank, where)
    declared = latent_rows(file.args)
    for name in tensors:
        rank, size = (ranks.expert_tp(file), layout.etp) if is_expert(name) else (file.tp, layout.tp)
        if tensors[name].shape == ():  # an optimizer's step count
            whole = Whole((), (Part(Region((), ()), tensors[name]),))
        else:
            whole = place_part(name, tensors, rank, size, declared, where)
        yield globalise(name, first_layer, file.ep * per_rank), whole


def latent_rows(args: Mapping[str, object]) -> dict[str, int]:
    """Return how many rows the down projections of latent attention have as a whole.

    Args:
        args: a run's arguments.

    Returns:
        Module → rows; empty without latent attention.
    """
    query, key, rope = (args.get(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"))
    rows = {"linear_q_down_proj": query} if type(query) is int else {}
    if type(key) is int and type(rope) is int:
        rows["linear_kv_down_proj"] = key + rope
    return rows


def _state_notes(states: Sequence[RankState]) -> list[str]:
    reasons = sorted({state.why_not for state in states if state.why_not})
    unknown = [f"the optimizer's tensors are listed and not told apart: {reasons[0]}"] if reasons else []
    return unknown + ([RESUMED["ranks"]] if any(state.file.rest.get("optimizer") for state in states) else [])


def _has_release(path: Path) -> bool:
    folder = path / RELEASE
    return read_tracker(path) == RELEASE and folder.is_dir() and any(name.startswith("mp_rank_") for name in list_names(folder))
