"""The product's own mapping of Megatron's ranks, made wrong: the native forward shows it, with no logits recorded.

A wrong rule is followed by the second path too, which takes the plan at its word; a wrong reader is not. What the ranks compute by
themselves contradicts both.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.export import NotPublishedError, run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from reports.model import Report
from tasks.engine.families import families
from tasks.engine.families.decoder import EMBEDDING, HEAD
from tasks.engine.formats import megatron, megatron_cuts, megatron_names
from tasks.engine.tensors.ops import Op, SplitQkv, SplitRows
from tasks.engine.tensors.region import Region
from tasks.engine.tensors.rules import Drop, Naming, Rule
from tests.builders.megatron import Grid, Model
from tests.builders.megatron_runs import RUN, prepare

pytestmark = pytest.mark.slow

DENSE = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
EVEN = replace(DENSE, heads=2)  # as many Q rows as K rows: blocks of them are equal thirds
EXPERTS = replace(DENSE, ffn=8, experts=4)
Patch = Callable[[pytest.MonkeyPatch], None]


def _export(folder: Path) -> Report:
    request = ExportRequest(
        source=folder / "ckpt",
        to=folder / "out",
        assets=folder / "hf",
        dtype="fp32",
        fsync=False,
        skip=["tokenizer=none here", "duplicates=small numbers", "outliers=small numbers", "rows=small numbers"],
        runs=folder / "runs",
    )
    return run_export(request, PlainRunner(), Silent()).report


def _rules(change: Callable[[Rule], Rule]) -> Patch:
    """Change the rules of every family's Megatron naming."""

    def wrong(row: Rule | Drop) -> Rule | Drop:
        return change(row) if isinstance(row, Rule) else row

    def namings(family: families.Family) -> tuple[Naming, ...]:
        return tuple(Naming(n.name, tuple(map(wrong, n.rows))) if n.name == "megatron" else n for n in family.namings)

    made = tuple(replace(family, namings=namings(family)) for family in families.FAMILIES)
    return lambda patch: patch.setattr(families, "FAMILIES", made)


def _exchanged(first: str, second: str) -> Callable[[Rule], Rule]:
    """Exchange two texts in the targets of rules."""
    swapped = {first: second, second: first}

    def target(name: str) -> str:
        return next((name.replace(text, other) for text, other in swapped.items() if text in name), name)

    return lambda rule: Rule(rule.source, tuple(map(target, rule.targets)), rule.op)


def _with_op(wrong: type[Op], op: Op) -> Callable[[Rule], Rule]:
    return lambda rule: Rule(rule.source, rule.targets, op) if isinstance(rule.op, wrong) else rule


def _fc1_plainly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(megatron_cuts, "_gated", lambda tensor, rank, ranks: megatron_cuts._cut(tensor, 0, rank, ranks))


def _ranks_backwards(text: str) -> Patch:
    """Take the ranks of some parameters in the wrong order."""

    def wrong(name, tensors, rank, ranks, declared, where):
        return megatron_cuts.place_part(name, tensors, ranks - 1 - rank if text in name else rank, ranks, declared, where)

    return lambda patch: patch.setattr(megatron, "place_part", wrong)


def _stages_one_by_one(patch: pytest.MonkeyPatch) -> None:
    right = megatron.number_layers

    def wrong(ranks, where):
        starts = right(ranks, where)
        return dict(zip(sorted(starts), sorted(starts.values()), strict=True))  # by pipeline stage, then by virtual stage

    patch.setattr(megatron, "number_layers", wrong)


def _experts(number: Callable[[int, int], int]) -> Patch:
    """Number experts by (local number, experts before this rank) in a wrong way."""

    def wrong(name: str, first_layer: int, first_expert: int) -> str:
        name = megatron_names.globalise(name, first_layer, 0)
        return megatron_names._LOCAL_EXPERT.sub(lambda m: f".local_experts.{number(int(m[1]), first_expert)}.", name)

    return lambda patch: patch.setattr(megatron, "globalise", wrong)


def _vocabulary_from_the_end(patch: pytest.MonkeyPatch) -> None:
    right = megatron_cuts._cut

    def wrong(tensor, dim, rank, ranks):
        whole = right(tensor, dim, rank, ranks)
        (part,) = whole.parts
        if whole.shape != (DENSE.padded, DENSE.hidden):
            return whole
        rows = whole.shape[0] // ranks
        moved = Region(((part.region.offset[0] + rows) % whole.shape[0], 0), part.region.shape)
        return replace(whole, parts=(replace(part, region=moved),))

    patch.setattr(megatron_cuts, "_cut", wrong)


FAULTS: dict[str, tuple[Model, Grid, Patch]] = {
    "gate and up exchanged by a rule": (DENSE, Grid(tp=2), _rules(_exchanged("gate_proj", "up_proj"))),
    "norms exchanged by a rule": (DENSE, Grid(tp=2), _rules(_exchanged("input_layernorm", "post_attention_layernorm"))),
    "QKV taken for blocks by a rule": (EVEN, Grid(tp=2), _rules(_with_op(SplitQkv, SplitRows()))),
    "Q and K rows permuted by a rule": (DENSE, Grid(tp=2), _rules(_with_op(SplitQkv, SplitQkv(rope_pairs=True)))),
    "head and embedding exchanged by a rule": (DENSE, Grid(tp=2), _rules(_exchanged(EMBEDDING, HEAD))),
    "an expert's gate and up exchanged by a rule": (EXPERTS, Grid(ep=2), _rules(_exchanged(".w1.", ".w3."))),
    "fc1 joined plainly": (DENSE, Grid(tp=2), _fc1_plainly),
    "KV ranks exchanged": (DENSE, Grid(tp=2), _ranks_backwards("linear_qkv")),
    "row-parallel ranks exchanged": (DENSE, Grid(tp=2), _ranks_backwards("linear_proj")),
    "virtual stages one by one": (DENSE, Grid(pp=2, vpp=2), _stages_one_by_one),
    "expert ranks exchanged": (EXPERTS, Grid(ep=2), _experts(lambda local, first: local + 2 - first)),
    "experts dealt one by one": (EXPERTS, Grid(ep=2), _experts(lambda local, first: 2 * local + first // 2)),
    "vocabulary cut from the end": (DENSE, Grid(tp=2), _vocabulary_from_the_end),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_native_forward_shows_a_wrong_mapping(fault, tmp_path, monkeypatch):
    model, grid, patch = FAULTS[fault]
    prepare(tmp_path, model, replace(grid, args=RUN), golden=False)
    patch(monkeypatch)
    with pytest.raises(NotPublishedError) as caught:
        _export(tmp_path)
    report = caught.value.outcome.report
    found = [finding for result in report.results for finding in result.findings if finding.code == "logits.mean-kl"]
    assert [finding.where for finding in found] == ["mapping: merged values against native forward"]
    assert "first diverging layer" in found[0].found
    followed = next(result for result in report.results if result.check == "values").status
    assert followed == ("passed" if fault.endswith("by a rule") else "failed")


@pytest.mark.parametrize("model", [DENSE, EVEN, EXPERTS], ids=["dense", "as many heads as groups", "experts"])
def test_a_right_mapping_is_proven_without_recorded_logits(model, tmp_path):
    prepare(tmp_path, model, Grid(pp=2, args=RUN), golden=False)
    report = _export(tmp_path)
    assert [(w.name, w.heard) for w in report.witnesses if "mapping" in w.proves] == [
        ("recorded", False),
        ("framework", False),
        ("native forward", True),
    ]
