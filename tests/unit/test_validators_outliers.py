"""Outliers among norms and matrices: what is said, and what honest models do that is not."""

from functools import partial

import pytest
import torch

from tests.builders.judging import judge_tensors, layers
from validators.outliers import examine


@pytest.fixture
def judge(tmp_path):
    """Return a function that writes tensors and says what the check finds, as (code, where)."""
    torch.manual_seed(3)
    return partial(judge_tensors, examine, tmp_path)


def gamma(_=0):
    return 1 + 0.2 * torch.randn(64)


def matrix(_=0):
    return 0.02 * torch.randn(48, 64)


def trained(_=0):
    """Return a matrix with the tails of training."""
    drawn = torch.randn(48, 64)
    return 0.01 * drawn * (1 + drawn**2)


@pytest.mark.parametrize(
    ("family", "code"),
    [("llama", ["outliers.norms-centred"]), ("someone_elses", ["outliers.norm-lean"]), ("gemma3_text", []), ("qwen3_next", [])],
)
def test_norms_centred_on_zero_are_wrong_only_in_a_family_known_to_centre_on_one(judge, family, code):
    tensors = layers(4, lambda i: gamma() - 1, "input_layernorm.weight", "post_attention_layernorm.weight")
    assert [found[0] for found in judge(tensors, model_type=family)] == code


def test_gammas_much_below_one_and_of_large_spread_pass(judge):
    tensors = layers(6, lambda i: (0.01 * (i + 1) * torch.randn(64)).exp() * 0.02, "input_layernorm.weight")
    tensors |= layers(6, lambda i: torch.randn(64).mul(1.5).exp(), "self_attn.k_norm.weight")
    assert judge(tensors, model_type="llama") == []


def test_first_layers_gamma_of_both_signs_passes_as_in_trained_models(judge):
    tensors = layers(6, lambda i: 0.02 * torch.randn(64) if i == 0 else gamma(), "input_layernorm.weight")
    assert judge(tensors, model_type="llama") == []


def test_fresh_norms_of_zeros_or_ones_in_the_whole_model_pass(judge):
    mixed = layers(4, lambda i: torch.zeros(64), "a_norm.weight") | layers(4, lambda i: torch.ones(64), "gated_norm.weight")
    assert judge(mixed) == []
    for fill in (torch.zeros, torch.ones):
        assert judge(layers(4, lambda i, fill=fill: fill(64), "a_norm.weight", "b_norm.weight"), model_type="llama") == []


def test_norms_of_one_role_left_at_one_are_said(judge):
    tensors = layers(4, gamma, "input_layernorm.weight") | layers(4, lambda i: torch.ones(64), "q_norm.weight")
    assert judge(tensors) == [("outliers.norm-untouched", "model.layers.*.q_norm.weight")]


@pytest.mark.parametrize(
    ("layer", "factor", "said"), [(3, 3, True), (3, 1 / 3, True), (3, 1.7, False), (0, 3, False), (0, 8, True), (7, 8, True)]
)
def test_matrix_of_another_size_than_its_neighbours_is_said(judge, layer, factor, said):
    tensors = layers(8, lambda i: matrix() * (factor if i == layer else 1), "up_proj.weight")
    assert judge(tensors) == ([("outliers.rms", f"model.layers.{layer}.up_proj.weight")] if said else [])


def test_size_that_grows_with_depth_passes(judge):
    assert judge(layers(12, lambda i: matrix() * 1.4**i, "up_proj.weight")) == []


def test_every_fourth_layer_of_another_kind_passes(judge):
    assert judge(layers(16, lambda i: matrix() * (3 if i % 4 == 3 else 1), "q_proj.weight")) == []


def test_layers_of_other_shapes_are_not_held_against_each_other(judge):
    assert judge(layers(6, lambda i: torch.randn(16, 8 * (1 + i % 2)) * (1 + 9 * (i == 3)), "kv_proj.weight")) == []


def test_expert_far_from_the_others_of_its_layer_is_said(judge):
    parts = [f"experts.{e}.up_proj.weight" for e in range(8)]
    tensors = layers(2, lambda i: matrix() * (1 + 4 * i), *parts)
    assert judge(tensors) == []
    tensors["model.layers.1.experts.6.up_proj.weight"] *= 4
    assert judge(tensors) == [("outliers.rms", "model.layers.1.experts.6.up_proj.weight")]


@pytest.mark.parametrize("make", [matrix, lambda i: 0.02 * (2 * torch.rand(48, 64) - 1)])
def test_one_fresh_matrix_among_trained_ones_is_said_and_an_all_fresh_role_is_not(judge, make):
    assert judge(layers(6, make, "up_proj.weight")) == []
    assert judge(layers(6, trained, "up_proj.weight")) == []
    tensors = layers(6, trained, "up_proj.weight")
    size = tensors["model.layers.1.up_proj.weight"].std()
    tensors["model.layers.4.up_proj.weight"] = make(0) / make(0).std() * size
    assert judge(tensors) == [("outliers.fresh", "model.layers.4.up_proj.weight")]


def test_values_that_are_not_finite_and_empty_tensors_do_not_stop_the_check(judge):
    tensors = layers(4, matrix, "up_proj.weight") | layers(4, gamma, "a_norm.weight") | layers(4, lambda i: torch.empty(0, 3), "none")
    tensors["model.layers.0.up_proj.weight"][:] = float("nan")
    tensors["model.layers.1.a_norm.weight"][:] = float("inf")
    assert judge(tensors, model_type="llama") == []


def without(share):
    """Return a matrix of which the first rows, so large a share, are zero."""
    made = trained()
    made[: int(share * len(made))] = 0
    return made


@pytest.mark.parametrize("share", [0.0625, 0.25, 0.5, 0.9])
def test_a_matrix_that_lost_rows_is_wrong_beside_siblings_that_have_theirs(judge, share):
    assert ("outliers.zeros", "model.layers.1.mlp.up_proj.weight") in judge(
        layers(3, lambda i: without(share if i == 1 else 0), "mlp.up_proj.weight")
    )


def test_pruned_models_pass_also_where_only_most_layers_are_pruned(judge):
    assert judge(layers(6, lambda i: trained() * (torch.rand(48, 64) > 0.5), "mlp.up_proj.weight")) == []
    assert judge(layers(6, lambda i: trained() * (torch.rand(48, 64) > (0.3 + 0.1 * i if i > 1 else 0)), "mlp.up_proj.weight")) == []


def test_layers_pruned_on_purpose_are_only_said(judge):
    found = judge(layers(6, lambda i: trained() * (torch.rand(48, 64) > (0.5 if i < 2 else 0)), "mlp.up_proj.weight"))
    assert {code for code, _ in found} == {"outliers.zeros-of-some"}


def test_a_few_values_flushed_by_a_cast_pass(judge):
    few = layers(4, lambda i: (trained() * (torch.rand(48, 64) > (0.04 if i == 0 else 0.002))).half(), "mlp.up_proj.weight")
    assert judge(few) == []


def test_of_two_siblings_neither_is_judged_by_the_other(judge):
    assert judge(layers(2, lambda i: without(0.25 * i), "mlp.up_proj.weight")) == []


def test_biases_of_fused_experts_may_hold_zeros(judge):
    assert judge(layers(4, lambda i: torch.randn(8, 16) * (torch.arange(8)[:, None] != i), "mlp.experts.down_proj_bias")) == []


@pytest.mark.parametrize("lost", [slice(None), slice(0, 32)])
def test_one_fused_expert_of_many_that_was_lost_is_named(judge, lost):
    def fused(layer):
        made = torch.randn(32, 64, 48)
        if layer == 1:
            made[7, lost] = 0
        return made

    assert judge(layers(2, fused, "mlp.experts.gate_up_proj")) == [("outliers.zeros", "model.layers.1.mlp.experts.gate_up_proj")]


def test_fused_experts_pruned_alike_pass(judge):
    assert judge(layers(2, lambda i: torch.randn(32, 64, 48) * (torch.rand(32, 64, 48) > 0.5), "mlp.experts.gate_up_proj")) == []
