"""Which parameter each tensor of a legacy file's optimizer belongs to. No tensor byte is read.

Optimizers keep no names. One that is not distributed numbers its parameters group by group (dense or expert, with or without weight decay),
in the model's order inside a group; a distributed one (`distrib_optim.pt`) keeps them in one flat vector, in the reverse of the model's
order, each from a multiple of 64 elements. Both orders are rebuilt from the model's names, and taken only where counts, shapes and lengths
agree with what is stored; else the state is listed, and `why_not` says what did not fit.

Not decoded: several buffers or buckets, virtual stages of distributed optimizers, parameter groups of other kinds.

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
from tasks.engine.formats.reader import Source
from tasks.engine.formats.torch_files import open_torch_file

DISTRIBUTED_FILE = "distrib_optim.pt"
ALIGNMENT = 64  # elements, at which parameters of a flat vector begin
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
            pairs = _vectors(vectors if isinstance(vectors, list) else [vectors], file, params)
        else:
            pairs = _numbered(optimizers, file, params)
        for slot, key, tensor in pairs:
            made.setdefault(slot, {})[key] = tensor
    except _UnfitError as error:
        return RankState(file, {}, str(error))
    slots = {slot: tuple(_of_chunk(tensors, chunk) for chunk in range(len(file.chunks))) for slot, tensors in made.items()}
    return RankState(file, slots)


def _of_chunk(tensors: Mapping[Key, StoredTensor], chunk: int) -> dict[str, StoredTensor]:
    return {name: tensor for (at, name), tensor in tensors.items() if at == chunk}


def _numbered(optimizers: Sequence[object], file: RankFile, params: Sequence[Key]) -> Iterator[tuple[str, Key, StoredTensor]]:
    for held in optimizers:
        if held is None:
            return
        outer = _dict(held)
        inner = _dict(outer["optimizer"]) if "optimizer" in outer else outer
        state, groups = _dict(inner.get("state")), inner.get("param_groups")
        masters = next((outer[name] for name in _MASTERS if name in outer), None)
        for place, group in enumerate(map(_dict, groups if isinstance(groups, list) else [])):
            keys = [key for key in params if _is_in(group, key, file)]
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


def _is_in(group: Mapping[object, object], key: Key, file: RankFile) -> bool:
    # Norms and biases have no weight decay.
    name, shape = key[1], file.chunks[key[0]][key[1]].shape
    decays = not (name.endswith(".bias") or len(shape) == 1)
    return decays == bool(group.get("wd_mult")) and is_expert(name) == bool(group.get("is_expert_parallel"))


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


def _vectors(held: Sequence[object], file: RankFile, params: Sequence[Key]) -> Iterator[tuple[str, Key, StoredTensor]]:
    if len(file.chunks) != 1:
        raise _UnfitError("a distributed optimizer over virtual stages")
    kinds = [keys for keys in ([k for k in params if not is_expert(k[1])], [k for k in params if is_expert(k[1])]) if keys]
    if len(held) != len(kinds):
        raise _UnfitError(f"{len(held)} distributed optimizers for {len(kinds)} kinds of parameters")
    for optimizer, keys in zip(held, kinds, strict=True):
        buffers = [value for name, value in _dict(optimizer).items() if isinstance(name, int)]
        if len(buffers) != 1 or len(_dict(buffers[0])) != 1:
            raise _UnfitError(f"a distributed optimizer with {len(buffers)} buffers")
        (vectors,) = _dict(buffers[0]).values()
        yield from _cut_vectors(_dict(vectors), keys, file)


def _cut_vectors(vectors: Mapping[object, object], keys: Sequence[Key], file: RankFile) -> Iterator[tuple[str, Key, StoredTensor]]:
    at, starts = 0, {}
    for key in reversed(keys):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        starts[key] = at
        at += prod(file.chunks[0][key[1]].shape)
    length = vectors.get("numel_unpadded")
    if not isinstance(length, int) or not at <= length < at + ALIGNMENT:
        raise _UnfitError(f"a flat vector of {length} elements, parameters in one bucket take {at}")
    for name, slot in _SLOTS.items():
        vector = vectors.get(name)
        if not isinstance(vector, StoredTensor):
            continue
        if vector.shape != (length,) or vector.strides != (1,):
            raise _UnfitError(f"{name} has shape {vector.shape}, not {length} elements")
        for key in keys:
            shape = file.chunks[0][key[1]].shape
            strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
            yield slot, key, StoredTensor(vector.dtype, vector.storage, vector.storage_offset + starts[key], shape, strides)


def _dict(value: object) -> Mapping[object, object]:
    return value if isinstance(value, dict) else {}
