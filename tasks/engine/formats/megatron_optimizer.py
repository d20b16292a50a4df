"""Which parameter each tensor of a legacy file's optimizer belongs to. No tensor byte is read.

Optimizers keep no names. One that is not distributed numbers its parameters group by group (dense or expert, with or without weight decay),
in the model's order inside a group; a distributed one (`distrib_optim.pt`) keeps those of each virtual stage in one flat vector, in the
reverse of the model's order (see megatron_flat). Both orders are rebuilt from the model's names, and taken only where counts, shapes and
lengths agree with what is stored; else the state is listed, and `why_not` says what did not fit.

Experts have an optimizer of their own where they are expert-parallel; where a rank is not the first of its data-parallel group, the file
says None in the place of the dense one.

Not decoded: several dtypes in one stage, parameter groups of other kinds, files from before buckets were joined (February 2024).

Source: Megatron-LM core 0.12 to main, megatron/core/optimizer/{optimizer,distrib_optimizer}.py; held against bf16 saves, whose masters
round to the weights beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tasks.engine.containers.torch_pickle import StoredTensor, describe
from tasks.engine.formats.folders import find_file
from tasks.engine.formats.megatron_args import MEGATRON_GLOBALS
from tasks.engine.formats.megatron_cuts import is_expert
from tasks.engine.formats.megatron_files import RankFile
from tasks.engine.formats.megatron_flat import own_buckets, starts_in
from tasks.engine.formats.reader import Source
from tasks.engine.formats.torch_files import open_torch_file

DISTRIBUTED_FILE = "distrib_optim.pt"
_BUFFERS = (".router.expert_bias", ".router.local_tokens_per_expert", "inv_freq")  # in the model's state dict, and not trained
_SLOTS: Mapping[str, str] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step", "param": "master"}
_MASTERS = ("fp32_from_fp16_params", "fp32_from_float16_groups")
Key = tuple[int, str]  # chunk, local name as saved


class _UnfitError(Exception):
    """What is stored does not fit the order rebuilt from names."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's optimizer: by slot, the tensors of each chunk by local name as saved; `file` is where they lie."""

    file: RankFile
    slots: Mapping[str, tuple[Mapping[str, StoredTensor], ...]]
    why_not: str = ""


def read_optimizer(file: RankFile, source: Source, inner: str) -> RankState:
    """Return the optimizer's tensors of one rank by the parameters they belong to.

    Args:
        file: the rank's file.
        source: the roots.
        inner: the save's folder inside the main root.

    Returns:
        The tensors; none, with the reason, where they cannot be told apart.

    Raises:
        HostilePickleError: a global outside the closed list.
        FormatError: the distributed optimizer's file is damaged.
    """
    held = file.rest.get("optimizer")
    optimizers = held if isinstance(held, list) else [held]
    params = [(chunk, name) for chunk, tensors in enumerate(file.chunks) for name in tensors if not name.endswith(_BUFFERS)]
    found = find_file(source, inner, f"{file.folder}/{DISTRIBUTED_FILE}")
    made: dict[str, dict[Key, StoredTensor]] = {}
    try:
        if found is not None:
            archive = open_torch_file(found.absolute)
            file = replace(file, found=found, archive=archive)
            vectors = describe(archive, MEGATRON_GLOBALS)
            pairs = _vectors(vectors if isinstance(vectors, list) else [vectors], file, _kinds(optimizers, params))
        else:
            pairs = _numbered(optimizers, file, _kinds(optimizers, params))
        for slot, key, tensor in pairs:
            made.setdefault(slot, {})[key] = tensor
    except _UnfitError as error:
        return RankState(file, {}, str(error))
    slots = {slot: tuple(_of_chunk(tensors, chunk) for chunk in range(len(file.chunks))) for slot, tensors in made.items()}
    return RankState(file, slots)


def _of_chunk(tensors: Mapping[Key, StoredTensor], chunk: int) -> dict[str, StoredTensor]:
    return {name: tensor for (at, name), tensor in tensors.items() if at == chunk}


def _kinds(optimizers: Sequence[object], params: Sequence[Key]) -> tuple[Sequence[Key], Sequence[Key]]:
    # The parameters of the dense optimizer and of the experts'. Only experts that are expert-parallel are apart; their groups say so.
    apart = any(group.get("is_expert_parallel") for held in optimizers for group in _groups(held))
    experts = [key for key in params if apart and is_expert(key[1])]
    return [key for key in params if key not in set(experts)], experts


def _groups(optimizer: object) -> list[Mapping[object, object]]:
    outer = _dict(optimizer)
    groups = _dict(outer.get("optimizer", outer)).get("param_groups")
    return [_dict(group) for group in groups] if isinstance(groups, list) else []


def _numbered(
    optimizers: Sequence[object], file: RankFile, kinds: tuple[Sequence[Key], Sequence[Key]]
) -> Iterator[tuple[str, Key, StoredTensor]]:
    for held in optimizers:
        if held is None:
            return
        outer = _dict(held)
        inner = _dict(outer["optimizer"]) if "optimizer" in outer else outer
        state = _dict(inner.get("state"))
        masters = next((outer[name] for name in _MASTERS if name in outer), None)
        for place, group in enumerate(_groups(held)):
            keys = [key for key in kinds[bool(group.get("is_expert_parallel"))] if _decays(key, file) == bool(group.get("wd_mult"))]
            numbers = group.get("params")
            if numbers is None and keys:
                raise _UnfitError(f"{file.folder} has no {DISTRIBUTED_FILE}, where its optimizer's tensors are")
            if not isinstance(numbers, list) or len(numbers) != len(keys):
                raise _UnfitError(f"parameter group {place} does not have the {len(keys)} parameters that names put into it")
            for key, number in zip(keys, numbers, strict=True):
                yield from _slots_of(_dict(state.get(number)), key, file)
            if isinstance(masters, list):
                of_group = masters[place] if place < len(masters) else None
                if not isinstance(of_group, list) or len(of_group) != len(keys):
                    raise _UnfitError(f"parameter group {place} does not have a master for each of its {len(keys)} parameters")
                for key, master in zip(keys, of_group, strict=True):
                    yield "master", key, _fitting(master, key, file)


def _decays(key: Key, file: RankFile) -> bool:
    # Norms and biases have no weight decay.
    return not (key[1].endswith(".bias") or len(file.chunks[key[0]][key[1]].shape) == 1)


def _slots_of(entry: Mapping[object, object], key: Key, file: RankFile) -> Iterator[tuple[str, Key, StoredTensor]]:
    for name, value in entry.items():
        if name == "step" and isinstance(value, StoredTensor) and value.shape == ():
            yield "step", key, value
        elif name in _SLOTS and name != "step":
            yield _SLOTS[str(name)], key, _fitting(value, key, file)


def _fitting(value: object, key: Key, file: RankFile) -> StoredTensor:
    shape = file.chunks[key[0]][key[1]].shape
    if not isinstance(value, StoredTensor) or value.shape != shape:
        found = value.shape if isinstance(value, StoredTensor) else type(value).__name__
        raise _UnfitError(f"{key[1]} has shape {shape}, its optimizer state {found}")
    return value


def _vectors(held: Sequence[object], file: RankFile, kinds: tuple[Sequence[Key], Sequence[Key]]) -> Iterator[tuple[str, Key, StoredTensor]]:
    wanted = [keys for keys in kinds if keys]
    if len(held) != len(wanted):
        raise _UnfitError(f"{len(held)} distributed optimizers for {len(wanted)} kinds of parameters")
    for optimizer, keys in zip(held, wanted, strict=True):
        if optimizer is None:  # of another rank of its data-parallel group
            continue
        buffers = [_dict(value) for name, value in sorted(_dict(optimizer).items(), key=str) if isinstance(name, int)]
        stages = [own for chunk in range(len(file.chunks)) if (own := [key for key in keys if key[0] == chunk])]
        if len(buffers) != len(stages) or any(len(buffer) != 1 for buffer in buffers):
            raise _UnfitError(f"a distributed optimizer with {sum(map(len, buffers))} buffers for {len(stages)} virtual stages")
        for buffer, own in zip(buffers, stages, strict=True):
            (vectors,) = buffer.values()
            yield from _cut_vectors(_dict(vectors), own, file)


def _cut_vectors(vectors: Mapping[object, object], keys: Sequence[Key], file: RankFile) -> Iterator[tuple[str, Key, StoredTensor]]:
    length, numels = vectors.get("numel_unpadded"), {key: prod(file.chunks[key[0]][key[1]].shape) for key in reversed(keys)}
    shared = [key for key in keys if own_buckets(key[1], file.args)]
    starts = starts_in(numels, shared, length) if isinstance(length, int) else None
    if starts is None:
        raise _UnfitError(f"a flat vector of {length} elements, its {sum(numels.values())} parameters aligned in one bucket take others")
    for name, slot in _SLOTS.items():
        vector = vectors.get(name)
        if not isinstance(vector, StoredTensor):
            continue
        if vector.shape != (length,) or vector.strides != (1,):
            raise _UnfitError(f"{name} has shape {vector.shape}, not {length} elements")
        for key in keys:
            shape = file.chunks[key[0]][key[1]].shape
            strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
            yield slot, key, StoredTensor(vector.dtype, vector.storage, vector.storage_offset + starts[key], shape, strides)


def _dict(value: object) -> Mapping[object, object]:
    return value if isinstance(value, dict) else {}
