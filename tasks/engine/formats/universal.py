"""DeepSpeed's universal checkpoints: one folder per parameter, one file per slot, whatever the world size that wrote them.

    ROOT/latest_universal                     text: the tag
    ROOT/<tag>/zero/<parameter>/fp32.pt       and exp_avg.pt, exp_avg_sq.pt, step.pt; {"param": tensor} in its shape,
                                              or (made from ZeRO-3) the bare tensor, flat
    ROOT/<tag>/zero/optimizer_state.pt        what is not per parameter; made from ZeRO-3, the only place of the step
    ROOT/<tag>/*_model_states.pt              copies of the model states: shapes, buffers, frozen weights, aliases

Buffers are taken from the model states, since their copy under `zero/` has lost integer dtypes.

Refused: a parameter without values, flat values shorter than their shape, or flat ones without a shape.

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from reports.errors import FormatError, name_some
from tasks.engine.containers.torch_pickle import describe, is_tensor
from tasks.engine.formats.deepspeed import DeepSpeedReader
from tasks.engine.formats.folders import FoundFile, digest_files, find_file, find_files, list_names, step_of
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.formats.reader import Probe
from tasks.engine.formats.state_dict import strip_all
from tasks.engine.formats.torch_files import open_torch_file
from tasks.engine.formats.zero_homes import Home, Part, find_aliases, find_frozen, find_in_module, follow_aliases
from tasks.engine.formats.zero_names import MODEL, SHARDED_MODEL, UNIVERSAL_FOLDER, Save, find_root, is_save, locate_save
from tasks.engine.formats.zero_pickles import ZERO_GLOBALS
from tasks.engine.formats.zero_states import ModelStates, TorchFile, read_model_states, read_steps
from tasks.engine.formats.zero_walk import REMEDY, Extent
from tasks.engine.tensors.catalog import Catalog, StateItem

FP32, OPTIMIZER_STATE = "fp32", "optimizer_state.pt"
_SLOT_FILE = re.compile(r"^(\w+)\.pt$")


class UniversalReader(DeepSpeedReader):
    """Reads one universal checkpoint.

    Args:
        source: its folder, or a root with `latest_universal`.
    """

    name: ClassVar[str] = "universal"
    universal: ClassVar[bool] = True

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Say whether `path` is a universal checkpoint, or a root of some.

        Args:
            path: a folder.

        Returns:
            The answer and its reason.
        """
        if is_save(path, universal=True):
            return Probe(True, f"it has {UNIVERSAL_FOLDER} and DeepSpeed's model states")
        root = find_root(path, universal=True)
        return Probe(root is not None, f"no folder {UNIVERSAL_FOLDER}" if root is None else "it has a universal checkpoint")

    def _make_catalog(self) -> Catalog:
        save = locate_save(self._source, universal=True)
        models = _models(save)
        files = _parameter_files(save)
        slots = {name: _read_slots(name, own, models[0]) for name, own in files.items()}
        homes = _homes(slots, models, save.where)
        short = strip_all(homes, save.where)
        tensors = {short[name]: self._table.add(short[name], home) for name, home in homes.items()}
        steps = _steps(save, models[0], [name for name, own in slots.items() if "step" in own])
        moments = ((slot, name, home) for name, own in slots.items() for slot, home in own.items() if slot != FP32)
        state = {}
        for slot, name, home in [*moments, *(("step", name, home) for name, home in steps.items() if isinstance(home, Home))]:
            key = slot_key(slot, short[name])
            state[key] = self._table.add(key, home)
        items = [StateItem(slot_key("step", short[name]), "object", value=step) for name, step in steps.items() if isinstance(step, int)]
        found = [*(file for own in files.values() for file in own.values()), *(states.file.found for states in models)]
        return Catalog(
            self.name,
            str(save.source.path.absolute()),
            models[0].step if models[0].step is not None else step_of(save.source.path.absolute()),
            MappingProxyType(tensors),
            self._table.builder.build(),
            (*items, *models[0].client),
            digest_files([states.file.archive.read("data.pkl") for states in models], found),
            sum(file.nbytes for file in found),
            notes=(*save.source.notes, *([f"save {save.tag} of {self._source.path.name}"] if save.source != self._source else [])),
            state_tensors=MappingProxyType(state),
        )


def _models(save: Save) -> list[ModelStates]:
    named = save.of_kind(MODEL) or save.of_kind(SHARDED_MODEL)
    if not named:
        raise FormatError("holds no copy of the model states", where=save.where, remedy=REMEDY)
    if [file.dp for file in named if file.mp == 0] != list(range(sum(file.mp == 0 for file in named))):
        raise FormatError(f"ranks are missing among {name_some(file.name for file in named)}", where=save.where, remedy=REMEDY)
    found = find_files(save.source, "", dict.fromkeys((file.name for file in named), 0))
    return [read_model_states(found[file.name]) for file in named]


def _parameter_files(save: Save) -> dict[str, dict[str, FoundFile]]:
    # Parameter → slot → file.
    folder = save.source.path / UNIVERSAL_FOLDER
    found: dict[str, dict[str, FoundFile]] = {}
    for name in (entry[:-1] for entry in list_names(folder) if entry.endswith("/")):
        slots = [match[1] for file in list_names(folder / name) if (match := _SLOT_FILE.match(file))]
        paths = {f"{UNIVERSAL_FOLDER}{name}/{slot}.pt": slot for slot in dict.fromkeys([FP32, *slots])}
        found[name] = {paths[path]: file for path, file in find_files(save.source, "", dict.fromkeys(paths, 0)).items()}
    return found


def _read_slots(name: str, files: Mapping[str, FoundFile], model: ModelStates) -> dict[str, Home]:
    return {slot: _read_home(name, slot, file, model) for slot, file in files.items()}


def _read_home(name: str, slot: str, found: FoundFile, model: ModelStates) -> Home:
    file = TorchFile(found, open_torch_file(found.absolute))
    held = describe(file.archive, ZERO_GLOBALS)
    tensor = held.get("param") if isinstance(held, dict) else held
    if not is_tensor(tensor):
        raise FormatError(f"holds no tensor, but a {type(held).__name__}", where=found.absolute, remedy=REMEDY)
    if isinstance(held, dict) or not tensor.shape:
        return Home(tensor.shape, (Part(file, tensor, None),))
    shape = next((group[name] for group in (*model.groups, model.frozen_shapes) if name in group), None)
    if shape is None:
        raise FormatError(f"{name} is flat, and the model states do not tell its shape", where=found.absolute, remedy=REMEDY)
    if tensor.shape[0] < prod(shape):
        raise FormatError(f"{slot} has {tensor.shape[0]} elements of shape {shape}", where=found.absolute, remedy=REMEDY)
    return Home(shape, (Part(file, tensor, Extent(0, 0, 0, prod(shape))),))  # behind it, the writer may leave what is no part of it


def _homes(slots: Mapping[str, Mapping[str, Home]], models: list[ModelStates], where: str) -> dict[str, Home]:
    first = models[0]
    lost = [name for states in models for group in states.groups for name in group if name not in slots]
    if lost:
        raise FormatError(f"{len(lost)} parameters have no folder under {UNIVERSAL_FOLDER}: {name_some(lost)}", where=where, remedy=REMEDY)
    homes = {name: own[FP32] for name, own in slots.items() if name not in first.buffers}
    homes |= {name: home for name, home in find_frozen(models, sharded=_is_sharded(first)).items() if name not in homes}
    aliases = find_aliases(first, homes)
    homes |= find_in_module(first, homes, aliases)
    homes |= follow_aliases(aliases, homes, first.file.where)
    order = [name for name in first.module or {} if name in homes]
    return {name: homes[name] for name in dict.fromkeys([*order, *homes])}


def _steps(save: Save, model: ModelStates, known: list[str]) -> dict[str, Home | int]:
    # Of parameters without a step.pt, as those made from ZeRO-3: the step of their sub-group.
    path = f"{UNIVERSAL_FOLDER}{OPTIMIZER_STATE}"
    if known or find_file(save.source, "", path) is None:
        return {}
    file, steps = read_steps(find_files(save.source, "", {path: 0})[path], len(model.groups))
    found: dict[str, Home | int] = {}
    for group, step in zip(model.groups, steps, strict=True):
        home = Home(step.shape, (Part(file, step, None),)) if is_tensor(step) else step
        found |= {name: home for name in group if isinstance(home, (Home, int))}
    return found


def _is_sharded(model: ModelStates) -> bool:
    # Under ZeRO-3 the model states hold placeholders.
    return any(0 in tensor.shape for tensor in (model.module or {}).values())
