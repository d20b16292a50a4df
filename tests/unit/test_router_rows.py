"""Rows of a router: measured as those of embeddings are, and judged where the expectation names it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tasks.measure import measure
from validators.expectation import Evidence, Expectation, ExpertGroup
from validators.experts import examine
from validators.measured import is_router
from validators.release import open_release

EXPERTS = 6
PREFIX = "model.layers.0.mlp."
ROUTER = f"{PREFIX}gate.weight"
NAMES = tuple((f"{PREFIX}experts.{e}.up_proj.weight",) for e in range(EXPERTS))


@pytest.fixture
def said(tmp_path):
    """Return a function that stores a router and says what the check finds of it, as (code, found)."""

    def judge(router, name=ROUTER):
        torch.manual_seed(5)
        tensors = {expert: torch.randn(4, 8) for (expert,) in NAMES} | {name: router}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        expected = Expectation("qwen3_moe", {n: tuple(t.shape) for n, t in tensors.items()}, is_tied=False)
        expected = replace(expected, experts=(ExpertGroup(0, name, NAMES),))
        table = measure(tmp_path, plan_path=None, source_roots=(), workers=1).tensors
        outcome = examine(Evidence(open_release(tmp_path), expected, tensors=table))
        return [(found.code, found.found) for found in outcome.findings]

    return judge


def rows(*origins):
    """Return a router whose row i is row origins[i] of a random one; -1 gives zeros."""
    drawn = torch.randn(EXPERTS, 8, generator=torch.Generator().manual_seed(2))
    return torch.stack([drawn[origin] if origin >= 0 else torch.zeros(8) for origin in origins])


def test_a_router_of_distinct_rows_passes(said):
    assert said(rows(*range(EXPERTS))) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [ROUTER, f"{PREFIX}router.weight", f"{PREFIX}router.layer.weight"])
def test_a_router_of_one_row_is_wrong_whatever_it_is_called(said, name, dtype):
    found = "5 of 6 are zero or equal an earlier one: 1, 2, 3, 4, 5"
    assert said(rows(*[0] * EXPERTS).to(dtype), name) == [("experts.router-equal", found)]


@pytest.mark.parametrize(
    ("origins", "names"),
    [((0, 1, 2, 0, 1, 2), "3 of 6"), ((0, 1, 2, 3, 4, 4), "1 of 6"), ((0, 0, 0, 0, 0, 5), "4 of 6"), ((0, 1, -1, -1, 4, 5), "2 of 6")],
)
def test_rows_that_repeat_are_only_said(said, origins, names):
    (found,) = said(rows(*origins))
    assert (found[0], found[1][:6]) == ("experts.router-repeats", names)


def test_a_router_of_zeros_is_the_finite_checks(said):
    assert said(rows(*[-1] * EXPERTS)) == []


def test_gates_of_feed_forwards_are_no_routers():
    assert not any(
        map(is_router, [f"{PREFIX}gate_proj.weight", f"{PREFIX}shared_expert_gate.weight", f"{PREFIX}gate_up_proj", "gate.bias"])
    )


def test_a_matrix_of_more_rows_than_there_are_experts_anywhere_is_not_measured_as_a_router(tmp_path):
    save_file({"layers.0.attn.gate.weight": torch.ones(5000, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert measure(tmp_path, plan_path=None, source_roots=(), workers=1).tensors["repeated"].tolist() == [""]
