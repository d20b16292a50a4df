"""Who feeds which expert, as a plan's sources say, and layers known from names alone."""

from dataclasses import replace

import pandas as pd
import pytest

from tests.builders.headers import codes_of, planned_release
from validators.check import run
from validators.expectation import Evidence, Expectation, ExpertGroup
from validators.experts import CHECK, examine

PREFIX = "model.layers.0.mlp.experts."
ROUTER = "model.layers.0.mlp.gate.weight"
NAMES = tuple((f"{PREFIX}{e}.up_proj.weight",) for e in range(3))
SHAPES = {name: (6, 4) for (name,) in NAMES} | {ROUTER: (3, 4)}
EXPECTED = Expectation("qwen3_moe", SHAPES, is_tied=False, experts=(ExpertGroup(0, ROUTER, NAMES),))


def plan(*sources):
    """Return the columns of a PlanTable that the check reads, for experts 0, 1, 2."""
    return pd.DataFrame({"name": [name for (name,) in NAMES], "sources": list(sources)})


def judge(*sources):
    """Return the check's outcome for a sound release with this plan."""
    return examine(Evidence(planned_release(SHAPES), EXPECTED, plan(*sources)))


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.0.mlp.experts.{e}.up_proj.weight[0:6,0:4]",  # by name
        "model.layers.0.mlp.experts.gate_up_proj[{e}:{f},6:12,0:4]",  # by place in a fused tensor
        "layers.0.moe.experts.w3[{e}:{f},0:6,0:4]",  # torchtitan's names
        "layers.0.experts.{e}.a[0:3,0:4];layers.0.experts.{e}.b[0:3,0:4]",  # two boxes
    ],
)
def test_expert_fed_by_itself_is_right_and_by_its_neighbour_is_wrong(pattern):
    right = [pattern.format(e=e, f=e + 1) for e in range(3)]
    assert codes_of(judge(*right)) == []
    outcome = judge(right[1], right[0], right[2])
    assert set(codes_of(outcome)) == {"experts.wrong-source"}
    assert outcome.findings[0].expected == "expert 0 of the source"


def test_source_that_is_no_box_is_errored_not_passed():
    result = run(CHECK, Evidence(planned_release(SHAPES), EXPECTED, plan("x", "y", "z")), lambda: 0.0)
    assert result.status == "errored"


def test_layers_are_known_from_expected_names_when_the_family_declares_no_experts():
    expected = replace(EXPECTED, experts=())
    outcome = examine(Evidence(planned_release({name: shape for name, shape in SHAPES.items() if ".2." not in name}), expected))
    assert codes_of(outcome) == ["experts.missing"]
    assert outcome.findings[0].found == "incomplete or absent: 2"
    assert outcome.examined == 3


def test_lost_experts_are_named_once_per_layer():
    held = {name: shape for name, shape in SHAPES.items() if ".0." not in name.removeprefix("model.layers.0") and ".2." not in name}
    (found,) = examine(Evidence(planned_release(held), EXPECTED)).findings
    assert (found.where, found.expected, found.found) == (PREFIX, "experts 0 to 2", "incomplete or absent: 0, 2")


def test_dense_model_is_looked_over_for_experts():
    expected = Expectation("llama", {"model.norm.weight": (4,)}, is_tied=False)
    assert examine(Evidence(planned_release({"model.norm.weight": (4,)}), expected)).examined == 1


def test_experts_with_equal_weights_are_identical_whatever_their_zero_biases():
    names = tuple((f"{PREFIX}{e}.up_proj.weight", f"{PREFIX}{e}.up_proj.bias") for e in range(3))
    expected = replace(EXPECTED, experts=(ExpertGroup(0, ROUTER, names),))
    rows = [
        {"name": name, "file": "m", "dtype": "F32", "shape": "6", "absmax": size, "rms": size, "mean": 0.0, "nonfinite": 0}
        | {"zero_share": float(size == 0), "constant": int(size == 0), "parity": f"{size}", "sample": "", "repeated": ""}
        for (weight, bias), rms in zip(names, (1.0, 2.0, 1.0), strict=True)
        for name, size in ((weight, rms), (bias, 0.0))
    ]
    (found,) = examine(
        Evidence(planned_release({n: (6,) for pair in names for n in pair} | {ROUTER: (3, 4)}), expected, tensors=pd.DataFrame(rows))
    ).findings
    assert (found.code, found.where, found.found) == ("experts.identical", f"{PREFIX}2", "those of expert 0")
