"""The sensitivity proof: faults planted into the evidence of a release, each of which the same checks must catch.

A gate that has not failed something is unproven. No file of the release is touched: a mutation changes the headers or the config as they
were read, or the values of one small tensor, which is written to a scratch folder and measured there as the release was. What only a
reference can show (an exchange, a flipped bit) is planted where there is one.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from safetensors import safe_open
from safetensors.torch import save_file

from reports.codes import finding
from reports.model import CheckResult, Finding
from tasks.check import gather_evidence
from tasks.handover import ReleaseFacts
from tasks.measure import measure
from validators.check import run
from validators.checks import CHECKS_OF_EXPORT
from validators.expectation import Evidence
from validators.policy import UNQUANTIZED
from validators.release import StoredTensor
from validators.shapes import whole_tensors

NAME = "sensitivity"
MAX_NBYTES = 64 << 20  # of a tensor whose values are changed


@dataclass(frozen=True, slots=True)
class _Room:
    # What mutations work with: the evidence, the tensors whose values may be changed, how to measure a changed one.
    evidence: Evidence
    small: tuple[StoredTensor, ...]
    scratch: Path
    plan: Path | None
    roots: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Mutation:
    # `plant` is given a tensor and returns changed evidence, or None where it does not apply.
    name: str
    plant: Callable[[_Room, StoredTensor], Evidence | None]


@task(name="prove sensitivity", cache_policy=NO_CACHE)
def prove(facts: ReleaseFacts, roots: tuple[Path, ...], skips: Mapping[str, str], count: int, scratch: Path) -> CheckResult:
    """Plant faults and see that the checks catch them.

    Args:
        facts: what is known of the release; its digests decide where faults are planted.
        roots: the source's folders; none without a source.
        skips: checks that are left out, so that they catch nothing.
        count: how many faults.
        scratch: a folder for changed tensors, made and left empty.

    Returns:
        A check's result: failed when a fault was missed.
    """
    evidence = gather_evidence(facts)
    small = tuple(t for t in whole_tensors(evidence.release) if 0 < t.stop - t.start <= MAX_NBYTES and t.dtype in UNQUANTIZED)
    room = _Room(evidence, small, scratch, facts.planned.whole if facts.planned else None, roots)
    scratch.mkdir(parents=True, exist_ok=True)
    known = _error_codes(evidence, skips)
    missed: list[Finding] = []
    caught: dict[str, str] = {}
    for name, where, changed in _plant(room, count, random.Random(repr(sorted(facts.digests.items())))):
        codes = _error_codes(changed, skips) - known
        if codes:
            caught[f"{name}: {where}"] = ", ".join(sorted({code for code, _ in codes}))
        else:
            missed.append(finding("sensitivity.missed", where, expected=f"{name} is caught", found="no check failed"))
    return CheckResult(NAME, "failed" if missed else "passed", tuple(missed), len(caught) + len(missed), caught)


def _error_codes(evidence: Evidence, skips: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    results = [run(check, evidence, lambda: 0.0) for check in CHECKS_OF_EXPORT if check.name not in skips]
    return frozenset((f.code, f.where) for result in results for f in result.findings if f.severity == "error")


def _plant(room: _Room, count: int, rng: random.Random) -> Iterator[tuple[str, str, Evidence]]:
    # Mutations take turns, each with another tensor every time; it is over when none has a tensor left.
    tensors = room.small or tuple(room.evidence.release.stored())
    queues = [(mutation, rng.sample(tensors, len(tensors))) for mutation in _MUTATIONS]
    planted = 0
    while any(queue for _, queue in queues):
        for mutation, queue in queues:
            found = _next_planted(room, mutation, queue)
            if found is None:
                continue
            if planted == count:
                return
            planted += 1
            yield mutation.name, *found


def _next_planted(room: _Room, mutation: _Mutation, queue: list[StoredTensor]) -> tuple[str, Evidence] | None:
    while queue:
        tensor = queue.pop()
        changed = mutation.plant(room, tensor)
        if changed is not None:
            return tensor.name, changed
    return None


def _lose(room: _Room, tensor: StoredTensor) -> Evidence | None:
    return _with_headers(room.evidence, tensor, None) if room.evidence.expected else None


def _rename(room: _Room, tensor: StoredTensor) -> Evidence | None:
    return _with_headers(room.evidence, tensor, replace(tensor, name=f"module.{tensor.name}")) if room.evidence.expected else None


def _transpose(room: _Room, tensor: StoredTensor) -> Evidence | None:
    if room.evidence.expected is None or tensor.shape == tensor.shape[::-1]:
        return None
    return _with_headers(room.evidence, tensor, replace(tensor, shape=tensor.shape[::-1]))


def _cut_short(room: _Room, tensor: StoredTensor) -> Evidence | None:
    files = tuple(replace(f, nbytes=f.nbytes - 1) if f.name == tensor.file else f for f in room.evidence.release.files)
    return replace(room.evidence, release=replace(room.evidence.release, files=files))


def _widen_vocabulary(room: _Room, tensor: StoredTensor) -> Evidence | None:
    config = room.evidence.release.config
    size = config.get("vocab_size")
    if room.evidence.expected is None or tensor.name != room.evidence.expected.embedding or not isinstance(size, int):
        return None
    return replace(room.evidence, release=replace(room.evidence.release, config={**config, "vocab_size": size + 1}))


def _poison(room: _Room, tensor: StoredTensor) -> Evidence | None:
    return _with_values(room, tensor, lambda values: values.reshape(-1)[:1].fill_(torch.nan))


def _erase(room: _Room, tensor: StoredTensor) -> Evidence | None:
    return _with_values(room, tensor, lambda values: values.zero_()) if len(tensor.shape) > 1 else None


def _flip_bit(room: _Room, tensor: StoredTensor) -> Evidence | None:
    if room.evidence.values is None:
        return None
    return _with_values(room, tensor, lambda values: values.view(torch.uint8).reshape(-1)[-values.element_size()].bitwise_xor_(1))


def _exchange_rows(room: _Room, tensor: StoredTensor) -> Evidence | None:
    if room.evidence.values is None or len(tensor.shape) < 2 or tensor.shape[0] < 2:
        return None
    return _with_values(room, tensor, lambda values: values[:2].copy_(values[[1, 0]]))


_MUTATIONS = (
    _Mutation("a NaN", _poison),
    _Mutation("a lost tensor", _lose),
    _Mutation("all zeros", _erase),
    _Mutation("a transposed shape", _transpose),
    _Mutation("a wrapper's prefix", _rename),
    _Mutation("a flipped bit", _flip_bit),
    _Mutation("a file cut short", _cut_short),
    _Mutation("two rows exchanged", _exchange_rows),
    _Mutation("a vocabulary one larger", _widen_vocabulary),
)


def _with_headers(evidence: Evidence, tensor: StoredTensor, changed: StoredTensor | None) -> Evidence:
    files = tuple(
        replace(file, tensors=tuple(kept for t in file.tensors if (kept := changed if t == tensor else t) is not None))
        for file in evidence.release.files
    )
    return replace(evidence, release=replace(evidence.release, files=files))


def _with_values(room: _Room, tensor: StoredTensor, change: Callable[[torch.Tensor], object]) -> Evidence | None:
    evidence = room.evidence
    if tensor not in room.small or evidence.tensors is None or evidence.release.folder is None:
        return None
    path = room.scratch / "model.safetensors"
    with safe_open(evidence.release.folder / tensor.file, "pt") as file:
        values = file.get_tensor(tensor.name).clone()
    change(values)
    save_file({tensor.name: values}, path, metadata={"format": "pt"})
    try:
        found = measure(room.scratch, plan_path=room.plan, source_roots=room.roots, workers=1)
    finally:
        path.unlink()
    own = found.tensors.assign(file=tensor.file)
    values_table = None if evidence.values is None else _replace_row(evidence.values, found.values)
    return replace(evidence, tensors=_replace_row(evidence.tensors, own), values=values_table)


def _replace_row(table: pd.DataFrame, row: pd.DataFrame) -> pd.DataFrame:
    # In its place, since tables follow the release's order; other witnesses' rows of the same tensor stay.
    same = table["name"].isin(row["name"])
    if "witness" in table.columns:
        same &= table["witness"].isin(row["witness"])
    changed = table.copy()
    changed.loc[same, row.columns] = row.to_numpy()
    return changed.astype(table.dtypes.to_dict())
