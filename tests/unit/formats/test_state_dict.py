"""Finding the model in a state dict, and its names without wrappers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import FormatError
from tasks.engine.formats.state_dict import MODEL_KEYS, STATE_KEYS, find_model, name_in_model, strip_all, strip_wrappers

WEIGHT = "model.layers.0.weight"


@pytest.mark.parametrize(
    ("paths", "model"),
    [
        ([("model", WEIGHT), ("optim", "state", WEIGHT, "exp_avg")], ("model",)),
        ([("app", "model", WEIGHT), ("app", "optim", "state", WEIGHT, "step")], ("app", "model")),
        ([("state", "model", WEIGHT), ("state", "optimizers", "x"), ("rng", "0")], ("state", "model")),
        ([("tok_embeddings.weight",), ("optimizer", "state", WEIGHT, "step"), ("train_state", "step")], ()),
        ([(WEIGHT,)], ()),
        ([("model.embed.weight",), ("lm_head.weight",)], ()),
    ],
    ids=["model and optim", "tutorial", "composer", "torchtitan", "flat", "flat names that begin with model"],
)
def test_the_model_is_found(paths, model):
    assert find_model(paths, "a") == model


def test_two_models_are_refused_by_name():
    with pytest.raises(FormatError, match="model, state_dict"):
        find_model([("model", "a"), ("state_dict", "a")], "a")


@pytest.mark.parametrize("key", [*STATE_KEYS, "optimizer_0"])
def test_training_state_at_the_root_is_no_part_of_the_model(key):
    assert name_in_model((key, "x"), ()) is None
    assert name_in_model((key,), ()) is None


@pytest.mark.parametrize("key", STATE_KEYS)
def test_inside_the_model_any_name_is_the_models(key):
    assert name_in_model(("model", key, "weight"), ("model",)) == f"{key}.weight"


def test_no_key_means_both_model_and_state():
    assert not MODEL_KEYS.keys() & STATE_KEYS.keys()


@pytest.mark.parametrize(
    "saved",
    [
        "module.layers.0.weight",
        "module.module.layers.0.weight",
        "_orig_mod.layers.0.weight",
        "layers.0._orig_mod.weight",
        "layers.0._checkpoint_wrapped_module._orig_mod.weight",
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight",
        "_fsdp_wrapped_module.module.layers.0.weight",
        "module._orig_mod.module._fsdp_wrapped_module.layers.0.weight",
    ],
)
def test_wrappers_are_stripped_wherever_they_are(saved):
    assert strip_wrappers(saved) == "layers.0.weight"


@pytest.mark.parametrize("name", ["layers.0.weight", "encoder.module.weight", "modules.0.weight", "my_orig_mod.weight", "_orig_mod"])
def test_names_that_only_look_like_wrappers_stay(name):
    assert strip_wrappers(name) == name


@given(st.lists(st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "layers", "0"]), min_size=1))
def test_stripping_is_stable(parts):
    name = ".".join([*parts, "weight"])
    assert strip_wrappers(strip_wrappers(name)) == strip_wrappers(name)


@pytest.mark.parametrize("name", ["_flat_param", "model.layers.0._flat_param", "_fsdp_wrapped_module.flat_param", "layers.flat_param_1"])
def test_flat_parameters_are_refused_with_the_reason(name):
    with pytest.raises(FormatError, match="the original shapes are in no file"):
        strip_all([name], "a")


def test_names_that_become_one_are_refused_with_both():
    with pytest.raises(FormatError, match=r"_orig_mod\.a\.weight and a\.weight are both a\.weight"):
        strip_all(["_orig_mod.a.weight", "a.weight"], "a")
