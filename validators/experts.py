"""Mixture-of-experts layers hold experts 0 to E-1, each its own, behind a router of E rows.

Ids are global: an expert-parallel rank that wrote local ids, or was read twice, shows as missing, unexpected or identical experts. Who
feeds whom is read from the plan: expert e comes from the source's expert e, by its name or by its place in a fused tensor.

A layer is known from the expectation, or, where that declares none, from the names it expects (`….experts.N.…`). On a dense model the
check makes sure that no expert is stored.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence, Expectation
from validators.measured import Signature, compared_rows, measured_rows
from validators.release import StoredTensor
from validators.sampled import ZERO_ROW, read_repeated
from validators.shapes import whole_tensors

_EXPERT = re.compile(r"^(?P<prefix>(?:.*\.)?experts\.)(?P<expert>\d+)(?=\.)")
_BOX = re.compile(r"^(?P<name>.*)\[(?P<box>[^\[\]]*)\]$")  # a PlanTable's source: name[o0:e0,o1:e1]
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One MoE layer. `prefix` ends in `experts.`; `experts` are the tensor names of each expert, all in one order."""

    prefix: str
    router: str
    experts: tuple[tuple[str, ...], ...]


def examine(evidence: Evidence) -> Outcome:
    """Judge experts and routers by name, by shape, by plan and by value, as far as evidence goes.

    Args:
        evidence: headers and expectation; plan, tables and config where there are some.

    Returns:
        Findings, and the number of experts judged; for a dense model, of names looked at.
    """
    assert evidence.expected is not None
    layers = _layers(evidence.expected)
    stored = evidence.release.by_name()
    whole = {tensor.name: tensor for tensor in whole_tensors(evidence.release)}
    sources, ids = _sources(evidence), _stored_ids(stored)
    findings = [
        *_judge_undeclared(layers, stored),
        *(found for layer in layers for found in _judge_ids(layer, stored, ids.get(layer.prefix, set()))),
        *(found for layer in layers for found in _judge_shapes(layer, whole)),
        *(found for layer in layers for found in _judge_router(layer, stored, evidence.release.config)),
        *_judge_router_rows(layers, whole, evidence),
        *(found for layer in layers for found in _judge_sources(layer, sources)),
        *_judge_identical(layers, evidence),
        *_judge_exchanged(layers, evidence),
    ]
    count = sum(len(layer.experts) for layer in layers)
    measured = {"moe_layers": len(layers), "experts": count, "planned_sources": len(sources)}
    return Outcome(tuple(findings), count or len(stored), measured)


def _layers(expected: Expectation) -> list[_Layer]:
    if expected.experts:
        return [_Layer(_prefix(group.experts[0][0]), group.router, group.experts) for group in expected.experts]
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(expected.shapes):
        if match := _EXPERT.match(name):
            found[match["prefix"]][int(match["expert"])].append(name)
    return [_Layer(prefix, "", tuple(tuple(ids[e]) for e in sorted(ids))) for prefix, ids in found.items()]


def _prefix(name: str) -> str:
    match = _EXPERT.match(name)
    if match is None:
        raise ValueError(f"{name}: an expert's name without `experts.N.`")
    return match["prefix"]


def _judge_undeclared(layers: Sequence[_Layer], stored: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    known = {layer.prefix for layer in layers}
    for name in sorted(stored):
        match = _EXPERT.match(name)
        if match and match["prefix"] not in known:
            yield finding("experts.undeclared", name, expected="a layer without experts", found=f"expert {match['expert']}")


def _stored_ids(stored: Mapping[str, StoredTensor]) -> Mapping[str, set[int]]:
    ids: dict[str, set[int]] = defaultdict(set)
    for name in stored:
        if match := _EXPERT.match(name):
            ids[match["prefix"]].add(int(match["expert"]))
    return ids


def _judge_ids(layer: _Layer, stored: Mapping[str, StoredTensor], ids: set[int]) -> Iterator[Finding]:
    lost = [str(e) for e, names in enumerate(layer.experts) if not all(name in stored for name in names)]
    if lost:
        found = f"incomplete or absent: {name_some(lost)}"
        yield finding("experts.missing", layer.prefix, expected=f"experts 0 to {len(layer.experts) - 1}", found=found)
    for expert in sorted(ids - set(range(len(layer.experts)))):
        yield finding("experts.unexpected-id", f"{layer.prefix}{expert}", expected=f"ids below {len(layer.experts)}", found=f"{expert}")


def _judge_shapes(layer: _Layer, stored: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    for names in zip(*layer.experts, strict=True):
        present = [stored[name] for name in names if name in stored]
        for tensor in present[1:]:
            if tensor.shape != present[0].shape:
                found = f"{tensor.shape}"
                yield finding("experts.shape", tensor.name, expected=f"{present[0].shape}, as {present[0].name}", found=found)


def _judge_router(layer: _Layer, stored: Mapping[str, StoredTensor], config: Mapping[str, object]) -> Iterator[Finding]:
    count = len(layer.experts)
    if layer.router and layer.router not in stored:
        yield finding("experts.router-missing", layer.router, expected=f"a router of {count} rows", found="absent")
    elif layer.router and stored[layer.router].shape[:1] != (count,):
        yield finding("experts.router-rows", layer.router, expected=f"{count} rows", found=f"shape {stored[layer.router].shape}")
    for field in _TOP_K:
        chosen = config.get(field)
        if isinstance(chosen, int) and not 1 <= chosen <= count:
            yield finding("experts.top-k", f"config.json: {field}", expected=f"1 to {count}", found=f"{chosen}")


def _judge_router_rows(layers: Sequence[_Layer], whole: Mapping[str, StoredTensor], evidence: Evidence) -> Iterator[Finding]:
    repeated = {} if evidence.tensors is None else read_repeated(evidence.tensors)
    for layer in layers:
        runs = repeated.get(layer.router, ()) if layer.router in whole else ()
        rows = whole[layer.router].shape[0] if runs else 0
        if sum(run.count for run in runs if run.origin == ZERO_ROW) == rows:
            continue  # no router, none that repeats, or one of zeros, which is the finite check's
        copies = [row for run in runs for row in range(run.start, run.stop)]
        is_one_row = all((run.origin, run.step) == (0, 0) for run in runs) and len(copies) == rows - 1
        code = "experts.router-equal" if is_one_row else "experts.router-repeats"
        found = f"{len(copies)} of {rows} are zero or equal an earlier one: {name_some(map(str, copies))}"
        yield finding(code, layer.router, expected="a row of its own per expert", found=found)


def _sources(evidence: Evidence) -> Mapping[str, str]:
    if evidence.plan is None:
        return {}
    return {name: text for name, text in zip(evidence.plan["name"], evidence.plan["sources"], strict=True) if _EXPERT.match(name)}


def _judge_sources(layer: _Layer, sources: Mapping[str, str]) -> Iterator[Finding]:
    for expert, names in enumerate(layer.experts):
        for name in names:
            for source in filter(None, sources.get(name, "").split(";")):
                feeder = _feeding_expert(source)
                if feeder is not None and feeder != expert:
                    yield finding("experts.wrong-source", name, expected=f"expert {expert} of the source", found=source)


def _feeding_expert(source: str) -> int | None:
    # The id in the source's name; else, of a fused tensor, the one index its box takes of the leading dim.
    match = _BOX.match(source)
    if match is None:
        raise ValueError(f"{source}: not a box of the form name[o0:e0,o1:e1]")
    if named := _EXPERT.match(match["name"]):
        return int(named["expert"])
    if not match["box"]:
        return None
    start, stop = (int(n) for n in match["box"].split(",")[0].split(":"))
    return start if stop - start == 1 else None


def _judge_identical(layers: Sequence[_Layer], evidence: Evidence) -> Iterator[Finding]:
    rows = {row.name: row for row in measured_rows(evidence.tensors)}
    for layer in layers:
        seen: dict[tuple[Signature, ...], int] = {}
        for expert, names in enumerate(layer.experts):
            held = [rows[name] for name in names if name in rows]
            if len(held) < len(names) or not any(row.is_telling for row in held):
                continue  # absent, or constant throughout: other findings
            first = seen.setdefault(tuple(row.signature for row in held), expert)
            if first != expert:
                yield finding(
                    "experts.identical", f"{layer.prefix}{expert}", expected="values of its own", found=f"those of expert {first}"
                )


def _judge_exchanged(layers: Sequence[_Layer], evidence: Evidence) -> Iterator[Finding]:
    rows = [row for row in compared_rows(evidence.values) if row.differing and row.expected_crc32 >= 0]
    owners, known = {row.expected_crc32: row.name for row in rows}, {layer.prefix for layer in layers}
    for row in rows:
        own, other = _EXPERT.match(row.name), _EXPERT.match(owners.get(row.found_crc32, ""))
        if own and other and own["expert"] != other["expert"] and own["prefix"] in known:
            yield finding("experts.exchanged", row.name, expected=f"expert {own['expert']}", found=f"the values of {other[0]}")


CHECK = Check("experts", ("family",), examine)
