"""Tensors of one role are grouped by layer."""

import math
from dataclasses import replace

import pytest

from reports.roles import common_prefix, group_roles, split_layer
from tests.builders.reports import statistics


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("model.layers.31.mlp.down_proj.weight", "model.layers.*.mlp.down_proj.weight", 31),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.*.mlp.experts.*.up_proj.weight", 3),
        ("transformer.h.2.attn.c_attn.bias", "transformer.h.*.attn.c_attn.bias", 2),
        ("lm_head.weight", "lm_head.weight", 0),
        ("", "", 0),
        ("a.²." + "9" * 40, "a.²." + "9" * 40, 0),
    ],
)
def test_the_first_number_is_the_layer_and_all_numbers_are_starred(name, role, layer):
    assert split_layer(name) == (role, layer)


def test_layers_are_ordered_by_number_however_they_are_stored():
    (role,) = group_roles([statistics(f"layers.{n}.w", n + 1.0) for n in (10, 2, 0)])
    assert [point.layer for point in role.rms] == [0, 2, 10]
    assert [point.mid for point in role.rms] == [1.0, 3.0, 11.0]


def test_the_experts_of_a_layer_share_a_point_from_least_to_greatest():
    (role,) = group_roles([statistics(f"layers.0.experts.{e}.w", rms) for e, rms in enumerate([0.3, 0.1, 0.2])])
    (point,) = role.rms
    assert (point.low, point.mid, point.high, role.tensors) == (0.1, 0.2, 0.3, 3)


def test_nan_and_zero_are_counted_and_not_drawn_as_values():
    healthy = statistics("layers.0.experts.0.w", 0.5)
    nan = replace(statistics("layers.0.experts.1.w", 0.5), rms=math.nan, nonfinite=1)
    zero = replace(statistics("layers.0.experts.2.w", 0.5), rms=0.0)
    (role,) = group_roles([healthy, nan, zero])
    (point,) = role.rms
    assert (point.low, point.high, point.nonfinite, point.zeros) == (0.5, 0.5, 1, 1)


def test_a_layer_without_any_value_has_no_middle():
    (role,) = group_roles([replace(statistics("layers.0.w", 1.0), rms=math.nan)])
    assert math.isnan(role.rms[0].mid)
    assert role.nonfinite == 1


def test_only_whole_parts_are_shared():
    assert common_prefix(["model.layers.*.mlp.up.weight", "model.layers.*.mlp.down.weight"]) == "model.layers.*.mlp."
    assert common_prefix(["abc.x", "abd.x"]) == ""
    assert common_prefix(["only.one"]) == ""
