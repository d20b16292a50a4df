"""What DeepSpeed's ranks wrote: ZeRO stages 0 to 3 and BF16_Optimizer, read without DeepSpeed.

The weights are the optimizer's fp32 masters; what it does not hold (buffers, frozen and untrained weights) comes from the model states.
Optimizer files are indexed, never loaded.

Refused: ranks missing or left over from a save of another world size, model states without their optimizer files; see also zero_names,
zero_states, zero_homes and zero_joins.

Source: deepspeed 0.19.8, runtime/engine.py, utils/zero_to_fp32.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from tasks.engine.containers.torch_pickle import is_tensor
from tasks.engine.formats.deepspeed import DeepSpeedReader
from tasks.engine.formats.folders import FoundFile, digest_files, list_names, step_of
from tasks.engine.formats.hf import TRAINER_FILES, HuggingFaceReader
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.formats.reader import Probe, Source
from tasks.engine.formats.state_dict import strip_all
from tasks.engine.formats.zero_files import INFO_FILE, ZeroFiles, open_save
from tasks.engine.formats.zero_homes import MASTER, Home, Part
from tasks.engine.formats.zero_model import Model, find_model
from tasks.engine.formats.zero_names import Save, find_root, is_save, locate_save
from tasks.engine.tensors.catalog import OTHER_SLOT, Catalog, Locator, StateItem


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a save is made of. `groups` are the trained parameters of each flat group; `frozen` what else is a parameter; `written` maps a
    catalog's names to those in the files. `weights` are the files of model states, layers and experts; `optimizer` is rank 0's optimizer
    file, None without ZeRO.
    """

    tag: str
    sharded: bool
    groups: tuple[tuple[str, ...], ...]
    frozen: tuple[str, ...]
    written: Mapping[str, str]
    weights: tuple[FoundFile, ...]
    optimizer: FoundFile | None
    tp_degree: int


class ZeroReader(DeepSpeedReader):
    """Reads one save of DeepSpeed as its ranks wrote it.

    Args:
        source: a save's folder, or a root with its tag; and the other nodes' roots.
    """

    name: ClassVar[str] = "zero"
    universal: ClassVar[bool] = False

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._anatomy: Anatomy | None = None

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` is a save of DeepSpeed, or a root of saves.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        if is_save(path, universal=False):
            return Probe(True, "it has DeepSpeed's model states")
        root = find_root(path, universal=False)
        if root is not None:
            return Probe(True, f"{root or 'it'} has saves of DeepSpeed")
        return Probe(False, "no *_model_states.pt, and no folder with one")

    def anatomy(self) -> Anatomy:
        """Return what the save is made of, for writing it in another way.

        Returns:
            Its parts; the same on every call.

        Raises:
            FormatError: see `catalog`.
        """
        self.catalog()
        assert self._anatomy is not None
        return self._anatomy

    def _make_catalog(self) -> Catalog:
        save = locate_save(self._source, universal=False)
        files = open_save(save)
        model = find_model(files, save.where)
        short = strip_all(model.homes, save.where)
        tensors = {short[name]: self._table.add(short[name], home) for name, home in model.homes.items()}
        replicas = [fragment for name, home in model.copies for fragment in self._table.replicas(short[name], home)]
        self._anatomy = _anatomy_of(save, files, model, short)
        state_tensors = {key: self._table.add(key, home) for key, home in _state_homes(model, short)}
        return Catalog(
            self.name,
            str(save.source.path.absolute()),
            files.models[0][0].step if files.models[0][0].step is not None else step_of(save.source.path.absolute()),
            MappingProxyType(tensors),
            self._table.builder.build(),
            (*_state_of(model, short, files), *_root_files(self._source.path, save), *_given_files(files)),
            digest_files(files.pickles(), files.found),
            sum(file.nbytes for file in files.found),
            tuple(replicas),
            (*save.source.notes, *_notes(self._source.path, save)),
            MappingProxyType(state_tensors),
        )


def _anatomy_of(save: Save, files: ZeroFiles, model: Model, short: Mapping[str, str]) -> Anatomy:
    first, optims = files.models[0][0], [states.file.found for ranks in files.optims for states in ranks]
    other = [name for name in model.homes if name not in model.trained and name not in first.buffers and name not in model.aliases]
    return Anatomy(
        save.tag,
        files.sharded,
        tuple(tuple(short[name] for name in group) for group in model.groups),
        tuple(short[name] for name in other),
        {stripped: name for name, stripped in short.items()},
        tuple(file for file in files.found if file not in optims),
        optims[0] if optims else None,
        files.tp_degree,
    )


def _state_homes(model: Model, short: Mapping[str, str]) -> Iterator[tuple[str, Home]]:
    # The moments and step counts of every parameter, slot by slot; the master is the model's own tensor.
    slots = dict.fromkeys(slot for trained in model.trained.values() for slot in trained.slots if slot != MASTER)
    for slot in slots:
        yield from ((slot_key(slot, short[name]), trained.slots[slot]) for name, trained in model.trained.items() if slot in trained.slots)
    for name, trained in model.trained.items():
        file, step = trained.step
        if is_tensor(step):
            yield slot_key("step", short[name]), Home(step.shape, (Part(file, step, None),))
    yield from ((f"{OTHER_SLOT}/{key}", home) for key, home in model.others.items())


def _state_of(model: Model, short: Mapping[str, str], files: ZeroFiles) -> list[StateItem]:
    steps = {name: trained.step[1] for name, trained in model.trained.items()}
    items = [StateItem(slot_key("step", short[name]), "object", value=step) for name, step in steps.items() if isinstance(step, int)]
    return items + list(files.models[0][0].client)


def _root_files(root: Path, save: Save) -> list[StateItem]:
    # What the trainer keeps beside the save, such as every rank's random number state.
    if root == save.source.path:
        return []
    paths = [root.absolute() / name for name in list_names(root) if any(pattern.match(name) for pattern in TRAINER_FILES)]
    return [StateItem(path.name, "object", places=(Locator(str(path), 0, path.stat().st_size),)) for path in paths]


def _given_files(files: ZeroFiles) -> list[StateItem]:
    # What the user says of the save.
    given = [file for file in files.found if file.name == INFO_FILE]
    return [StateItem(file.name, "object", places=(Locator(file.absolute, 0, file.nbytes),)) for file in given]


def _notes(root: Path, save: Save) -> list[str]:
    if root == save.source.path:
        return []
    notes = [f"save {save.tag} of {root.name}"]
    if HuggingFaceReader.probe(root).matches:
        notes.append("the Hugging Face weights beside the save were not read: the optimizer's fp32 masters are the source")
    return notes
