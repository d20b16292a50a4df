"""Inventory and shapes on headers alone."""

from dataclasses import replace

import pytest

from tests.builders.headers import codes_of, planned_release
from validators import inventory, shapes
from validators.expectation import Evidence, Expectation

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SHAPES = {EMBEDDING: (10, 4), HEAD: (10, 4), NORM: (4,)}
UNTIED = Expectation("llama", SHAPES, is_tied=False, tied=((EMBEDDING, HEAD),), embedding=EMBEDDING, head=HEAD)
TIED = replace(UNTIED, shapes={EMBEDDING: (10, 4), NORM: (4,)}, is_tied=True)


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("module.module.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._orig_mod.mlp.up.weight", "model.layers.0.mlp.up.weight"),
        ("_orig_mod._fsdp_wrapped_module.a._checkpoint_wrapped_module._orig_mod.b", "a.b"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("submodule.weight", "submodule.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_wrappers_are_stripped_wherever_they_stand(name, stripped):
    assert inventory.strip_wrappers(name) == stripped


def test_a_wrapped_name_is_not_reported_missing_as_well():
    release = planned_release({EMBEDDING: (10, 4), HEAD: (10, 4), f"module.{NORM}": (4,)})
    assert codes_of(inventory.examine(Evidence(release, UNTIED))) == ["inventory.wrapper-prefix"]


@pytest.mark.parametrize("held", [{EMBEDDING: (10, 4), NORM: (4,)}, SHAPES])
def test_alias_of_a_tied_pair_may_be_there_or_not(held):
    release = planned_release(held)
    assert codes_of(inventory.examine(Evidence(release, TIED))) == []
    assert codes_of(shapes.examine(Evidence(release, TIED))) == []


def test_alias_that_is_expected_must_be_there():
    release = planned_release({EMBEDDING: (10, 4), NORM: (4,)})
    assert codes_of(inventory.examine(Evidence(release, replace(TIED, shapes=SHAPES)))) == ["inventory.missing"]


def test_kept_alias_of_another_shape_is_found():
    release = planned_release({**SHAPES, HEAD: (12, 4)})
    assert codes_of(shapes.examine(Evidence(release, TIED))) == ["shapes.vocabulary-padded"]


def test_scalar_tensor_is_compared_like_any_other():
    expected = replace(UNTIED, shapes={"scale": ()})
    assert shapes.examine(Evidence(planned_release({"scale": ()}), expected)).examined == 1
    assert codes_of(shapes.examine(Evidence(planned_release({"scale": (1,)}), expected))) == ["shapes.wrong"]


def test_dtype_of_the_request_binds_every_float_tensor():
    release = planned_release(SHAPES, dtype="BF16")
    assert codes_of(shapes.examine(Evidence(release, UNTIED, dtype="BF16"))) == []
    assert codes_of(shapes.examine(Evidence(release, UNTIED, dtype="F16"))) == ["shapes.dtype"] * 3
