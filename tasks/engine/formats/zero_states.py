"""What DeepSpeed's files hold, read through the closed list into values with types: tensors as places, nothing loaded.

The trainer's client state is written over the top level of the model states, so any key may have been replaced by it: every key that is
used is checked for its kind, and a key of another kind is refused by name.

Source: deepspeed 0.19.8, runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`), runtime/zero/stage_1_and_2.py and stage3.py
(`state_dict`), runtime/bf16_optimizer.py (`state_dict`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from reports.errors import FormatError, name_some
from tasks.engine.containers.torch_pickle import StoredTensor, describe
from tasks.engine.containers.torch_zip import Archive
from tasks.engine.formats.folders import FoundFile
from tasks.engine.formats.torch_files import open_torch_file
from tasks.engine.formats.zero_pickles import ZERO_GLOBALS, FragmentAddress
from tasks.engine.tensors.catalog import StateItem

Shape = tuple[int, ...]
T = TypeVar("T")

# Keys that the engine writes beside the client state; any other is the trainer's
ENGINE_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
    | {"lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"}
    | {"checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers", "universal_checkpoint_info"}
    | {"sparse_tensor_module_names", "csr_tensor_module_names"}
)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file of the save and its zip directory."""

    found: FoundFile
    archive: Archive

    @property
    def where(self) -> str:
        """The file, for messages."""
        return self.found.absolute


@dataclass(frozen=True, slots=True)
class ModelStates:
    """One file of model states.

    `module` is None for pipelines; under ZeRO-3 its parameters are placeholders without elements. `groups` are the parameters of each
    flat group (each sub-group under ZeRO-3), in the vector's order. `aliases` map a tied name to the one stored. `round_robin`
    says that DeepSpeed reordered the groups, which `groups` follow and the ranks' maps do not. `joins` is what the writer says of how
    the parts of tensor-parallel ranks join; `client` is the trainer's own state, counters with their values.
    """

    file: TorchFile
    module: Mapping[str, StoredTensor] | None
    buffers: tuple[str, ...]
    groups: tuple[Mapping[str, Shape], ...]
    frozen_shapes: Mapping[str, Shape]
    frozen: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    step: int | None
    mp_world: int
    tp_degree: int | None
    optimizer: object
    client: tuple[StateItem, ...]
    round_robin: bool
    joins: Mapping[object, object] | None


@dataclass(frozen=True, slots=True)
class OptimStates:
    """One rank's optimizer file: per group a vector of masters, per slot a vector beside it, and the step.

    `sharded` says that it is of ZeRO-3, where each parameter is cut by itself. `counts` are the ranks that share each group; `gaps` the
    unused elements behind each parameter, where the writer recorded them; `slices` where each parameter's piece lies in this rank's
    vectors, where recorded.
    """

    file: TorchFile
    sharded: bool
    masters: tuple[StoredTensor, ...]
    slots: Mapping[str, tuple[StoredTensor | None, ...]]
    steps: tuple[StoredTensor | int | None, ...]
    counts: tuple[int, ...]
    gaps: tuple[tuple[int, ...], ...]
    slices: tuple[Mapping[str, tuple[int, int]], ...]


def open_states(found: FoundFile) -> tuple[TorchFile, Mapping[object, object]]:
    """Return what a file of the save describes.

    Args:
        found: the file.

    Returns:
        The file, and its top-level mapping with tensors as places.

    Raises:
        HostilePickleError: a class outside the closed list.
        FormatError: damaged, or no mapping.
    """
    archive = open_torch_file(found.absolute)
    held = describe(archive, ZERO_GLOBALS)
    if not isinstance(held, dict):
        raise archive.refuse(f"holds a {type(held).__name__}, DeepSpeed writes a mapping")
    return TorchFile(found, archive), held


def read_model_states(found: FoundFile) -> ModelStates:
    """Return one file of model states.

    Args:
        found: the file.

    Returns:
        Its content.

    Raises:
        HostilePickleError: a class outside the closed list.
        FormatError: damaged, or a key that holds something else than the engine writes.
    """
    file, held = open_states(found)
    take = _Taker(file, held)
    tp_degree = (take("checkpoint_parallel_dimensions", _mapping) or {}).get("tp_degree")
    return ModelStates(
        file,
        take("module", _tensors_of),
        tuple(take("buffer_names", _names) or ()),
        tuple(take("param_shapes", _list_of_shapes) or ()),
        take("frozen_param_shapes", _shapes) or {},
        take("frozen_param_fragments", _tensors) or {},
        take("shared_params", _texts) or {},
        take("global_steps", _count),
        take("mp_world_size", _count) or 1,
        tp_degree if isinstance(tp_degree, int) else None,
        held.get("optimizer"),
        tuple(_client_item(key, value) for key, value in held.items() if key not in ENGINE_KEYS),
        _is_round_robin(held.get("ds_config")),
        take("universal_checkpoint_info", _mapping),
    )


def _client_item(key: object, value: object) -> StateItem:
    return StateItem(f"client_state.{key}", "object", value=value if isinstance(value, int | str) and not isinstance(value, bool) else None)


def read_optim_states(found: FoundFile) -> OptimStates:
    """Return one rank's optimizer file.

    Args:
        found: the file.

    Returns:
        Its content.

    Raises:
        HostilePickleError: a class outside the closed list.
        FormatError: damaged, or a key that holds something else than the engine writes.
    """
    file, top = open_states(found)
    held = _Taker(file, top)("optimizer_state_dict", _mapping) or {}
    take = _Taker(file, held)
    sharded = take("fp32_flat_groups", _list_of_tensors)
    if sharded is not None:
        inner = take("optimizer_state_dict", _mapping) or {}
        slots, steps = _slots(_Taker(file, inner)("state", _mapping) or {}, inner.get("param_groups"), len(sharded))
        counts = (take("partition_count", _count) or 0,) * len(sharded)
        return OptimStates(file, True, tuple(sharded), slots, steps, counts, (), ())
    masters = take("single_partition_of_fp32_groups", _list_of_tensors)
    if masters is None:
        raise file.archive.refuse(f"holds no fp32 masters, only {name_some(map(str, held))}")
    if isinstance(held.get("base_optimizer_state"), list):  # elastic: per group, without the optimizer's own wrapping
        base: Mapping[object, object] = dict(enumerate(take("base_optimizer_state", _list) or ()))
        slots, steps = _slots(base, None, len(masters), held.get("base_optimizer_state_step"))
    else:
        outer = take("base_optimizer_state", _mapping) or {}
        slots, steps = _slots(_Taker(file, outer)("state", _mapping) or {}, outer.get("param_groups"), len(masters))
    counts = tuple(take("partition_count", lambda value: _per_group(value, len(masters))) or ())
    gaps = take("param_alignment_paddings", lambda value: [tuple(_counts(row)) for row in _list(value)]) or ()
    slices = take("param_slice_mappings", lambda value: [_addresses(row) for row in _list(value)]) or ()
    return OptimStates(file, False, tuple(masters), slots, steps, counts, tuple(gaps), tuple(slices))


def read_plain_fields(found: FoundFile) -> tuple[Mapping[str, object], list[object]]:
    """Return what an optimizer file keeps of the run as a whole: numbers and texts, and the parameter groups' settings.

    Args:
        found: one rank's optimizer file.

    Returns:
        Plain fields by name, and one mapping of settings per group; tensors and the trainer's objects are left out.

    Raises:
        HostilePickleError: a class outside the closed list.
        FormatError: damaged.
    """
    file, top = open_states(found)
    held = _Taker(file, top)("optimizer_state_dict", _mapping) or {}
    inner = held.get("optimizer_state_dict") or held.get("base_optimizer_state")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    plain = {str(key): value for key, value in held.items() if _is_plain(value) and not isinstance(value, dict)}
    settings = [{k: v for k, v in group.items() if _is_plain(v)} for group in groups or () if isinstance(group, dict)]
    version = top.get("ds_version")
    return ({"ds_version": version, **plain} if isinstance(version, str) else plain), list(settings)


def _is_plain(value: object) -> bool:
    # Numbers, texts and nests of them: what any pickle reader builds without a class.
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def read_steps(found: FoundFile, num_groups: int) -> tuple[TorchFile, tuple[StoredTensor | int | None, ...]]:
    """Return the step counts that a universal checkpoint made from ZeRO-3 keeps beside the parameters.

    Args:
        found: its `optimizer_state.pt`.
        num_groups: how many sub-groups there are.

    Returns:
        The file, and each sub-group's step; None where it holds none.

    Raises:
        HostilePickleError: a class outside the closed list.
        FormatError: damaged.
    """
    file, held = open_states(found)
    inner = _Taker(file, held)("optimizer_state_dict", _mapping) or {}
    _, steps = _slots(_Taker(file, inner)("state", _mapping) or {}, inner.get("param_groups"), num_groups)
    return file, steps


def _is_round_robin(config: object) -> bool:
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


class _Taker:
    # Takes keys of one mapping of one file, each proven to be of its kind.
    def __init__(self, file: TorchFile, held: Mapping[object, object]) -> None:
        self._file, self._held = file, held

    def __call__(self, key: str, kind: Callable[[object], T]) -> T | None:
        value = self._held.get(key)
        try:
            return None if value is None else kind(value)
        except TypeError as error:
            raise FormatError(
                f"{key} holds {error}: not what DeepSpeed writes there",
                where=self._file.where,
                remedy="Client state given to save_checkpoint overwrites keys of the same name; save again under another name.",
            ) from None


def _slots(
    state: Mapping[object, object], param_groups: object, num_groups: int, step: object = None
) -> tuple[Mapping[str, tuple[StoredTensor | None, ...]], tuple[StoredTensor | int | None, ...]]:
    # Per slot, its vector in each group; and each group's step, which torch keeps in the state, Apex in the parameter groups.
    slots: dict[str, list[StoredTensor | None]] = {}
    steps: list[StoredTensor | int | None] = []
    for group in range(num_groups):
        own = state.get(group, {})
        own = own if isinstance(own, dict) else {}
        for slot, value in own.items():
            if slot != "step" and isinstance(value, StoredTensor) and len(value.shape) == 1:
                slots.setdefault(str(slot), [None] * num_groups)[group] = value
        steps.append(_step(own.get("step", step), param_groups, group))
    return MappingProxyType({slot: tuple(vectors) for slot, vectors in slots.items()}), tuple(steps)


def _step(value: object, param_groups: object, group: int) -> StoredTensor | int | None:
    if value is None and isinstance(param_groups, list):
        rows = [row for row in param_groups if isinstance(row, dict)]
        value = next((row.get("step") for row in rows if group in (row.get("params") or ())), None)
    return value if isinstance(value, (StoredTensor, int)) else None


def _of_kind(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__}")
    return value


def _mapping(value: object) -> Mapping[object, object]:
    return _of_kind(value, dict)


def _list(value: object) -> list[object]:
    return _of_kind(value, list)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r}"[:40])
    return value


def _counts(value: object) -> list[int]:
    return [_count(item) for item in _list(value)]


def _per_group(value: object, num_groups: int) -> list[int]:
    return _counts(value) if isinstance(value, list) else [_count(value)] * num_groups  # one number in old versions


def _text(value: object) -> str:
    return _of_kind(value, str)


def _names(value: object) -> list[str]:
    return [_text(item) for item in _list(value)]


def _texts(value: object) -> Mapping[str, str]:
    return {_text(key): _text(item) for key, item in _mapping(value).items()}


def _shape(value: object) -> Shape:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"a {type(value).__name__}")
    return tuple(_count(length) for length in value)


def _shapes(value: object) -> Mapping[str, Shape]:
    return {_text(name): _shape(shape) for name, shape in _mapping(value).items()}


def _list_of_shapes(value: object) -> list[Mapping[str, Shape]]:
    return [_shapes(row) for row in (value if isinstance(value, list) else [value])]


def _tensor(value: object) -> StoredTensor:
    return _of_kind(value, StoredTensor)


def _list_of_tensors(value: object) -> list[StoredTensor]:
    return [_tensor(item) for item in _list(value)]


def _tensors(value: object) -> Mapping[str, StoredTensor]:
    return {_text(name): _tensor(item) for name, item in _mapping(value).items()}


def _tensors_of(value: object) -> Mapping[str, StoredTensor]:
    # A state dict may hold extra state that is no tensor.
    return {str(name): item for name, item in _mapping(value).items() if isinstance(item, StoredTensor)}


def _addresses(value: object) -> Mapping[str, tuple[int, int]]:
    found = {}
    for name, address in _mapping(value).items():
        if not isinstance(address, FragmentAddress):
            raise TypeError(f"a {type(address).__name__}")
        found[_text(name)] = (_count(getattr(address, "numel", None)), _count(getattr(address, "start", None)))
    return found
