"""Continuing a run with the user's own step, after a restore by torch's loader.

The user's function, `--resume module:function`, is called in every rank as `function(rank, world_size)`, with the process group running,
and returns an object with five methods:

    state() -> dict         the state dict that the trainer hands to dcp.save, freshly built
    restore(state)          puts a loaded state dict into model, optimizer, schedule, data and RNG
    next_batch() -> batch   the next batch of this rank
    step(batch) -> float    trains on it; returns the loss
    rates() -> list[float]  the learning rates in use

After `restore`, `state()` is asked once more and every value is held against what was loaded; then steps are taken.
"""

import hashlib
import importlib
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from reports.errors import RequestError
from tasks.restoring.accepted import AcceptedReader
from tasks.restoring.jobs import RankAnswer, ResumeJob, StateDifference, StepAnswer

State = dict[str, Any]
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Training(Protocol):
    """What the user's function returns."""

    def state(self) -> State: ...
    def restore(self, state: State) -> None: ...
    def next_batch(self) -> object: ...
    def step(self, batch: object) -> float: ...
    def rates(self) -> Sequence[float]: ...


def resume_at(rank: int, world: int, job: ResumeJob) -> RankAnswer:
    """Restore, compare the state, take the steps.

    Args:
        rank: of this process.
        world: how many there are.
        job: what to continue.

    Returns:
        What this rank saw.
    """
    training = cast("Training", find_function(job.resume)(rank, world))
    begun = time.perf_counter()
    state = training.state()
    for folder in job.folders:
        _load(Path(folder.folder), state)
    saved = {key: _copy(value) for key, value in flatten(state)}
    training.restore(state)
    loaded = time.perf_counter()
    differences = tuple(compare_states(saved, dict(flatten(training.state()))))
    steps: list[StepAnswer] = []
    first = 0.0
    for number in range(job.steps):
        started = time.perf_counter()
        batch = training.next_batch()
        rng, rates = digest_values(torch.get_rng_state()), tuple(float(rate) for rate in training.rates())
        steps.append(StepAnswer(float(training.step(batch)), rates, digest_values(batch), rng))
        first = first if number else time.perf_counter() - started
    return RankAnswer(rank, tuple(steps), differences, len(saved), loaded - begun, first)


def find_function(name: str) -> Any:  # noqa: ANN401  # the user's
    """Return the function that `module:function` names.

    Args:
        name: what --resume says.

    Returns:
        The function.

    Raises:
        RequestError: no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"cannot be imported: {error}", where=f"--resume {name}", remedy="Give module:function, importable from here."
        ) from error


def _load(folder: Path, state: State) -> None:
    # The parts of the state that this folder holds, in place.
    reader = AcceptedReader(folder)
    tops = {item.path[0] for item in reader.accepted.items()}
    part = {key: value for key, value in state.items() if key in tops}
    load(part, storage_reader=reader)
    state.update(part)


def flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of a state dict.

    Args:
        value: dicts, lists and leaves; bytes that are a pickle of the trainer's own are opened.
        key: what it is called.

    Yields:
        Dotted key, leaf.
    """
    if isinstance(value, bytes) and value.startswith(_PICKLE) and value.endswith(b"."):
        value = pickle.loads(value)  # accepted with the item it came in, or made by the trainer just now
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    else:
        children = []
    if not children:
        yield key, value
    for name, child in children:
        yield from flatten(child, f"{key}.{name}" if key else str(name))


def compare_states(saved: Mapping[str, object], found: Mapping[str, object]) -> Iterator[StateDifference]:
    """Yield what a restore changed, lost or put elsewhere.

    Args:
        saved: leaves as loaded.
        found: leaves as the trainer has them after the restore.

    Yields:
        One difference per key.
    """
    homes = {digest_values(value): key for key, value in saved.items() if isinstance(value, torch.Tensor) and _local(value).numel() > 1}
    for key, wanted in saved.items():
        if key not in found:
            yield StateDifference(key, "missing" if isinstance(wanted, torch.Tensor) else "value", "absent after the restore")
        elif isinstance(wanted, torch.Tensor):
            yield from _compare_tensors(key, wanted, found[key], homes)
        elif not _is_equal(wanted, found[key]):
            yield StateDifference(key, "value", f"{_short(found[key])} where {_short(wanted)} was saved")


def _compare_tensors(key: str, wanted: torch.Tensor, found: object, homes: Mapping[str, str]) -> Iterator[StateDifference]:
    if not isinstance(found, torch.Tensor):
        yield StateDifference(key, "values", f"a {type(found).__name__}")
        return
    one, other = _local(wanted), _local(found)
    if digest_values(one) == digest_values(other) and one.dtype == other.dtype:
        return
    home = homes.get(digest_values(other))
    if one.shape == other.shape and not other.any() and one.any():
        yield StateDifference(key, "zero", "zeros")
    elif one.shape == other.shape and one.is_floating_point() and _is_rounded(one, other):
        yield StateDifference(key, "rounded", "rounded to 16 bits")
    elif home is not None and home != key:
        yield StateDifference(key, "moved", f"the values of {home}")
    else:
        yield StateDifference(key, "values", _short(other) if other.numel() == 1 else "other values")


def _is_rounded(one: torch.Tensor, other: torch.Tensor) -> bool:
    return any(torch.equal(one.to(narrow).to(torch.float64), other.to(torch.float64)) for narrow in (torch.bfloat16, torch.float16))


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return digest_values(one) == digest_values(other)
    same = one == other
    return same if isinstance(same, bool) else bool(getattr(same, "all", lambda: same)())


def _short(value: object) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)[:60]


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest_values(value: object) -> str:
    """Return the sha256 of a value's bytes: tensors in C order, dicts and lists part by part, other things as they print.

    Args:
        value: a batch, or a part of the state.

    Returns:
        64 hex digits.
    """
    digest = hashlib.sha256()
    for _, leaf in flatten(value):
        if isinstance(leaf, torch.Tensor):
            digest.update(_local(leaf).contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
