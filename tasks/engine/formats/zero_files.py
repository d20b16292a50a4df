"""The files of one ZeRO save, opened: all that the save must have are there, and none is of another save.

How many ranks there are is told by the files: by the optimizer files' `partition_count`, and for pipelines and tensor parallelism by
`mp_world_size`. Ranks that are missing, and ranks too many, are named by number.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.errors import FormatError, name_some
from tasks.engine.containers.ranges import read_whole
from tasks.engine.containers.torch_pickle import StoredTensor
from tasks.engine.formats.folders import FoundFile, find_file, find_files
from tasks.engine.formats.zero_names import EXPERT, EXPERT_OPTIM, LAYER, MODEL, OPTIM, RANK, SHARDED_MODEL, NamedFile, Save
from tasks.engine.formats.zero_states import ModelStates, OptimStates, TorchFile, open_states, read_model_states, read_optim_states
from tasks.engine.formats.zero_walk import REMEDY

INFO_FILE = "universal_checkpoint_info.json"  # of the user, where the writer recorded nothing
STALE = "Move away the files of the other save, or export another step."


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of low-precision weights: one layer of a pipeline, or one expert."""

    named: NamedFile
    file: TorchFile
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """A save's files. `models` and `optims` hold, per mp rank, the files of its data-parallel ranks in order."""

    models: tuple[tuple[ModelStates, ...], ...]
    optims: tuple[tuple[OptimStates, ...], ...]
    layers: tuple[WeightFile, ...]
    experts: tuple[WeightFile, ...]
    found: tuple[FoundFile, ...]
    joins: Mapping[object, object] | None

    @property
    def tp_degree(self) -> int:
        """Tensor-parallel ranks; the mp ranks of one pipeline stage follow each other."""
        first = self.models[0][0]
        if first.tp_degree is not None:
            return first.tp_degree
        is_pipeline = first.module is None
        return 1 + max((weights.named.mp for weights in self.layers), default=0) if is_pipeline else len(self.models)

    @property
    def sharded(self) -> bool:
        """Whether it is ZeRO-3."""
        return any(states.sharded for ranks in self.optims for states in ranks[:1])

    def pickles(self) -> list[bytes]:
        """Return the metadata of all files, for the digest.

        Returns:
            Their pickles, in a fixed order.
        """
        files = [states.file for ranks in self.models for states in ranks]
        files += [states.file for ranks in self.optims for states in ranks]
        files += [weights.file for weights in (*self.layers, *self.experts)]
        return [file.archive.read("data.pkl") for file in files]


def open_save(save: Save) -> ZeroFiles:
    """Open the files of a save.

    Args:
        save: which save.

    Returns:
        The files, complete.

    Raises:
        HostilePickleError: a class outside the closed list.
        FormatError: ranks are missing or too many, or a file is damaged.
    """
    named = save.of_kind(MODEL) or save.of_kind(SHARDED_MODEL)
    if not named:
        raise FormatError(f"holds no model states, only {name_some(file.name for file in save.files)}", where=save.where, remedy=REMEDY)
    opened = _Opened(save)
    first = opened.model(named[0].name)
    world = _world(opened, save)
    models = opened.models(named, first, world)
    optims = opened.optims(save.of_kind(OPTIM), first.mp_world, world)
    _refuse_lone_models(models, optims, save)
    layers, experts = (opened.weights(save.of_kind(kind)) for kind in (LAYER, EXPERT))
    joins = first.joins if first.joins is not None else _given_joins(opened, save)
    return ZeroFiles(models, optims, layers, experts, tuple(opened.found.values()), joins)


def _given_joins(opened: "_Opened", save: Save) -> Mapping[object, object] | None:
    # What the user says where the writer recorded nothing.
    if find_file(save.source, "", INFO_FILE) is None:
        return None
    (found,) = opened.find([INFO_FILE])
    try:
        told = json.loads(read_whole(found.absolute))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is not JSON: {error}", where=found.absolute, remedy="Mend it, or leave it out.") from error
    if not isinstance(told, dict):
        raise FormatError(f"holds a {type(told).__name__}, not an object", where=found.absolute, remedy="Mend it, or leave it out.")
    return told


class _Opened:
    # Finds files in the roots, once each, and reads them.
    def __init__(self, save: Save) -> None:
        self._save = save
        self.found: dict[str, FoundFile] = {}
        self._read_models: dict[str, ModelStates] = {}
        self._read_optims: dict[str, OptimStates] = {}

    def model(self, name: str) -> ModelStates:
        if name not in self._read_models:
            self._read_models[name] = read_model_states(self.find([name])[0])
        return self._read_models[name]

    def optim(self, name: str) -> OptimStates:
        if name not in self._read_optims:
            self._read_optims[name] = read_optim_states(self.find([name])[0])
        return self._read_optims[name]

    def find(self, names: Sequence[str]) -> list[FoundFile]:
        found = find_files(self._save.source, "", dict.fromkeys(names, 0), RANK)
        self.found |= found
        return [found[name] for name in names]

    def models(self, named: Sequence[NamedFile], first: ModelStates, world: int) -> tuple[tuple[ModelStates, ...], ...]:
        sharded = named[0].kind == SHARDED_MODEL
        names = [
            [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in range(world)]
            if sharded
            else [f"mp_rank_{mp:02d}_model_states.pt"]
            for mp in range(first.mp_world)
        ]
        self._refuse_strangers(
            named, {name for row in names for name in row}, f"{world} ranks" if sharded else f"{first.mp_world} mp ranks"
        )
        self.find([name for row in names for name in row])
        return tuple(tuple(self.model(name) for name in row) for row in names)

    def optims(self, named: Sequence[NamedFile], mp_world: int, world: int) -> tuple[tuple[OptimStates, ...], ...]:
        if not named:
            return ()
        precisions = sorted({file.precision for file in named})
        if len(precisions) > 1:
            raise FormatError(
                f"optimizer files of two precisions: {name_some(file.name for file in named)}", where=self._save.where, remedy=STALE
            )
        stem = "optim_states.pt" if "_optim_" not in named[0].name else "_optim_states.pt"  # old versions leave the underscore out
        names = [[f"{precisions[0]}zero_pp_rank_{dp}_mp_rank_{mp:02d}{stem}" for dp in range(world)] for mp in range(mp_world)]
        self._refuse_strangers(named, {name for row in names for name in row}, f"{world} ranks")
        self.find([name for row in names for name in row])
        ranks = tuple(tuple(self.optim(name) for name in row) for row in names)
        for row in ranks:
            _refuse_mixture(row)
        return ranks

    def weights(self, named: Sequence[NamedFile]) -> tuple[WeightFile, ...]:
        made = []
        for file, found in zip(named, self.find([file.name for file in named]), strict=True):
            opened, held = open_states(found)
            made.append(WeightFile(file, opened, {str(k): v for k, v in held.items() if isinstance(v, StoredTensor)}))
        return tuple(made)

    def _refuse_strangers(self, named: Sequence[NamedFile], names: set[str], world: str) -> None:
        strange = [file.name for file in named if file.name not in names]
        if strange:
            raise FormatError(f"is a save of {world}, so {name_some(strange)} are of another", where=self._save.where, remedy=STALE)


def _world(opened: _Opened, save: Save) -> int:
    # How many data-parallel ranks there are, as the optimizer files say; without any, as there are model states.
    named = save.of_kind(OPTIM)
    if not named:
        return max((file.dp for file in save.of_kind(SHARDED_MODEL)), default=0) + 1
    counts = opened.optim(named[0].name).counts
    return max(counts, default=max(file.dp for file in named) + 1)


def _refuse_lone_models(models: tuple[tuple[ModelStates, ...], ...], optims: tuple[tuple[OptimStates, ...], ...], save: Save) -> None:
    # Only ZeRO-0 has no optimizer files; its model states list no flat groups.
    if not optims and (save.of_kind(SHARDED_MODEL) or any(states.groups for ranks in models for states in ranks)):
        raise FormatError(
            "the model states are of a ZeRO save, but no optimizer file (*_optim_states.pt) is there, and they hold the weights",
            where=save.where,
            remedy=REMEDY,
        )
    if save.of_kind(EXPERT_OPTIM) and optims:
        raise FormatError("holds optimizer files with and without ZeRO: two saves in one folder", where=save.where, remedy=STALE)


def _refuse_mixture(ranks: Sequence[OptimStates]) -> None:
    first = ranks[0]
    for states in ranks[1:]:
        if (states.sharded, states.counts, sorted(states.slots)) != (first.sharded, first.counts, sorted(first.slots)):
            raise FormatError(
                f"differs from {first.file.found.name} in stage, rank counts or optimizer slots; parts of two saves?",
                where=states.file.where,
                remedy=REMEDY,
            )
