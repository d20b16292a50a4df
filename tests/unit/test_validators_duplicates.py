"""Copies among siblings, on tensors measured as the product measures them: what counts as one, and what is honest."""

import pytest
import torch
from safetensors.torch import save_file

from tasks.measure import measure
from tests.builders.headers import codes_of
from validators.duplicates import examine
from validators.expectation import Evidence
from validators.release import Release


@pytest.fixture
def judge(tmp_path):
    """Return a function that writes tensors and says what the check finds, as (code, where)."""

    def judged(tensors):
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, tmp_path / "m.safetensors", {"format": "pt"})
        return examine(Evidence(Release(tmp_path, ()), tensors=measure(tmp_path, plan_path=None, source_roots=(), workers=1).tensors))

    torch.manual_seed(11)
    return judged


def _layers(count, make, *parts):
    return {f"model.layers.{i}.{part}": make() for i in range(count) for part in parts}


def _matrix():
    return torch.randn(16, 24) * 0.02


def _found(outcome):
    return [(found.code, found.where, found.found) for found in outcome.findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_independent_layers_pass_in_every_dtype(judge, dtype):
    assert _found(judge(_layers(12, lambda: _matrix().to(dtype), "a.weight", "b.weight"))) == []


def test_copied_layer_is_one_finding_that_names_the_original(judge):
    tensors = _layers(4, _matrix, "a.weight", "b.weight", "c.weight") | _layers(4, lambda: torch.ones(8), "norm.weight")
    tensors |= {f"model.layers.3.{part}.weight": tensors[f"model.layers.1.{part}.weight"] for part in "abc"}
    assert _found(judge(tensors)) == [("duplicates.unit", "model.layers.3", "those of model.layers.1")]


def test_quantized_integers_show_a_copy_too(judge):
    tensors = _layers(3, lambda: torch.randint(-(2**31), 2**31 - 1, (8, 16), dtype=torch.int32), "a.qweight", "b.qweight")
    tensors |= {f"model.layers.2.{part}.qweight": tensors[f"model.layers.0.{part}.qweight"] for part in "ab"}
    assert _found(judge(tensors)) == [("duplicates.unit", "model.layers.2", "those of model.layers.0")]


def test_expert_of_another_layer_and_id_is_found(judge):
    parts = [f"mlp.experts.{e}.{part}_proj.weight" for e in range(4) for part in ("up", "down")]
    tensors = _layers(3, _matrix, "attn.weight", *parts)
    for part in ("up", "down"):
        tensors[f"model.layers.2.mlp.experts.0.{part}_proj.weight"] = tensors[f"model.layers.0.mlp.experts.3.{part}_proj.weight"]
    assert [found[0] for found in _found(judge(tensors))] == ["duplicates.unit"]


@pytest.mark.parametrize("moved", [0.0, 0.02])
def test_table_that_all_layers_share_is_only_said(judge, moved):
    decay = torch.arange(1, 17).log().repeat(32, 1)
    tensors = _layers(4, _matrix, "in_proj.weight") | _layers(4, lambda: decay * (1 + moved * torch.randn(32, 16)), "A_log")
    assert set(codes_of(judge(tensors))) <= {"duplicates.shared"}


def test_masks_small_matrices_and_vectors_are_not_judged(judge):
    small, vector = torch.randn(4, 4), torch.randn(64)
    tensors = _layers(3, lambda: torch.ones(16, 16).tril(), "attn.bias") | _layers(3, lambda: small, "s") | _layers(3, lambda: vector, "v")
    outcome = judge(tensors | _layers(3, _matrix, "w"))
    assert (_found(outcome), outcome.measured["matrices"], outcome.examined) == ([], 3, 12)


def test_half_of_a_matrix_in_common_is_no_copy(judge):
    tensors = _layers(3, _matrix, "a.weight")
    tensors["model.layers.2.a.weight"][:8] = tensors["model.layers.1.a.weight"][:8]
    assert _found(judge(tensors)) == []


def test_values_that_are_not_finite_are_no_copy_of_each_other(judge):
    tensors = _layers(3, _matrix, "a.weight")
    for tensor in tensors.values():
        tensor[::2] = float("nan")
    assert _found(judge(tensors)) == []


def test_expert_of_a_fused_tensor_is_found_and_called_as_by_itself(judge):
    tensors = _layers(3, lambda: torch.randn(4, 16, 24), "mlp.experts.gate_up_proj", "mlp.experts.down_proj") | _layers(3, _matrix, "w")
    assert _found(judge(tensors)) == []
    for part in ("gate_up_proj", "down_proj"):
        tensors[f"model.layers.1.mlp.experts.{part}"][2] = tensors[f"model.layers.1.mlp.experts.{part}"][0]
    assert _found(judge(tensors)) == [("duplicates.unit", "model.layers.1.mlp.experts.2", "those of model.layers.1.mlp.experts.0")]
