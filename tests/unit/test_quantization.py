"""What a quantization_config says, and which stored tensors are parts of quantized weights."""

from pathlib import Path

import pytest

from validators.layouts import Scheme
from validators.quantization import encoded_names, read_quantization
from validators.release import Release, StoredTensor, WeightFile

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def _release(said: object, tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None, *others: str) -> Release:
    stored = tuple(StoredTensor(name, "a", dtype, shape, 0, 0) for name, (dtype, shape) in (tensors or {}).items())
    config = {} if said is None else {"quantization_config": said}
    return Release(Path("folder"), (WeightFile("a", 0, 0, stored, {}),), config=config, others=others)


def _compressed(form: str, weights: object, **more: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (_compressed("pack-quantized", WEIGHTS), Scheme("packed", "pack-quantized", "int", 4, (1, 32))),
        (_compressed("pack-quantized", {**WEIGHTS, "strategy": None}), Scheme("packed", "pack-quantized", "int", 4, (1, 32))),
        (_compressed("int-quantized", {"num_bits": 8, "group_size": -1}), Scheme("plain", "int-quantized", "int", 8, (1, 0))),
        (_compressed("int-quantized", {"num_bits": 8}), Scheme("plain", "int-quantized", "int", 8, (0, 0))),
        (
            _compressed("float-quantized", {"type": "float", "strategy": "block", "block_structure": "128x64"}),
            Scheme("plain", "float-quantized", "float", 8, (128, 64)),
        ),
        (
            _compressed("float-quantized", {"type": "float", "strategy": "tensor"}, input_activations={"dynamic": False}),
            Scheme("plain", "float-quantized", "float", 8, (0, 0), has_input_scale=True),
        ),
        (_compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), Scheme("", "nvfp4-pack-quantized")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Scheme("fp8 blocks", "fp8 blocks", "float", 8, (128, 128))),
        ({"quant_method": "fbgemm_fp8"}, Scheme("fp8 tensors", "fp8 tensors", "float", 8, (0, 0))),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            Scheme("fp8 tensors", "fp8 tensors", "float", 8, (0, 0), has_input_scale=True),
        ),
    ],
)
def test_scheme_is_what_the_config_says(said, scheme):
    group = read_quantization(_release(said)).group_of("model.layers.0.mlp.up_proj")
    assert group is not None
    assert group.scheme == scheme


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (_compressed("pack-quantized", {**WEIGHTS, "group_size": 0}), "groups of size"),
        (_compressed("pack-quantized", {**WEIGHTS, "num_bits": 16}), "bits"),
        (_compressed("pack-quantized", {**WEIGHTS, "num_bits": True}), "bits"),
        (_compressed("pack-quantized", {**WEIGHTS, "type": "float"}), "4 bits of type 'float' in format 'pack-quantized'"),
        (_compressed("float-quantized", {"type": "float", "num_bits": 4}), "4 bits of type 'float' in format 'float-quantized'"),
        ({"config_groups": {}}, "quant_method"),
        ({"bits": 4}, "quant_method"),
        (["int4"], "list, not an object"),
        (_compressed("pack-quantized", {**WEIGHTS, "strategy": "diagonal"}), "diagonal"),
        (_compressed("pack-quantized", {**WEIGHTS, "strategy": "block"}), "block_structure"),
        (_compressed("pack-quantized", "W4A16"), "weights"),
        ({"quant_method": "compressed-tensors", "config_groups": ["W4A16"]}, "config_groups"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["(a+)+"]}, "forever"),
    ],
)
def test_a_config_without_sense_is_said_to_be_unreadable(said, word):
    assert word in read_quantization(_release(said)).unreadable


@pytest.mark.parametrize(
    ("method", "pattern", "module", "matches"),
    [
        ("compressed-tensors", "lm_head", "lm_head", True),
        ("compressed-tensors", "lm_head", "model.lm_head", False),
        ("compressed-tensors", "re:.*gate$", "model.layers.0.mlp.gate", True),
        ("compressed-tensors", "re:.*gate$", "model.layers.0.mlp.gate_proj", False),
        ("compressed-tensors", "re:gate", "model.layers.0.mlp.gate", False),
        ("fp8", "lm_head", "model.lm_head", True),
        ("fp8", "model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("fp8", "model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("fp8", "gate", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_a_pattern_means_what_the_method_s_own_loader_takes_it_for(method, pattern, module, matches):
    said = {"quant_method": method, "config_groups": {}, "ignore": [pattern], "modules_to_not_convert": [pattern]}
    assert read_quantization(_release(said)).is_ignored(module) is matches


def test_a_group_that_names_a_module_goes_before_one_that_targets_its_class():
    four, eight = {"targets": ["Linear"], "weights": WEIGHTS}, {"targets": ["re:.*down_proj"], "weights": {**WEIGHTS, "num_bits": 8}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": four, "b": eight}}
    found = read_quantization(_release(said))
    bits = [found.group_of(f"model.layers.0.mlp.{name}_proj").scheme.bits for name in ("up", "down")]
    assert bits == [4, 8]
    assert found.group_of("model.embed_tokens") is None


PARTS = {
    "a.q_proj.weight_packed": ("I32", (8, 1)),
    "a.q_proj.weight_scale": ("BF16", (8, 1)),
    "a.q_proj.bias": ("BF16", (8,)),
    "a.k_scale": ("F32", (1,)),
    "norm.weight": ("BF16", (8,)),
}


def test_biases_and_norms_beside_quantized_weights_are_not_parts_of_them():
    said = read_quantization(_release(_compressed("pack-quantized", WEIGHTS), PARTS))
    assert set(said.weights) == {"a.q_proj.weight"}
    assert said.encoded == {"a.q_proj.weight_packed", "a.q_proj.weight_scale", "a.k_scale"}
    assert said.aside == {"a.q_proj.weight_scale", "a.k_scale"}
    assert set(said.cache) == {"a.k_scale"}


def test_without_a_declaration_no_tensor_is_left_out_of_the_other_checks():
    assert encoded_names(_release(None, PARTS)) == frozenset()
    assert encoded_names(_release(None, PARTS, "hf_quant_config.json")) != frozenset()
    assert set(read_quantization(_release(None, PARTS)).weights) == {"a.q_proj.weight"}


def test_a_release_without_quantization_has_none():
    said = read_quantization(_release(None, {"norm.weight": ("BF16", (8,)), "a.q_proj.weight": ("F32", (8, 8))}))
    assert (said.method, said.weights, said.encoded) == ("", {}, frozenset())


@pytest.mark.parametrize("said", [{"load_in_4bit": True}, {"load_in_8bit": True}, {"quant_method": "quark"}])
def test_a_method_that_is_told_otherwise_or_unknown_is_no_config_without_sense(said):
    assert read_quantization(_release(said)).unreadable == ""


def test_the_older_field_needs_no_method():
    release = Release(None, (), config={"compression_config": {"config_groups": {}, "quantization_status": "Frozen"}})
    found = read_quantization(release)
    assert (found.unreadable, found.method, found.is_compressed) == ("", "compressed-tensors", False)


@pytest.mark.parametrize(("status", "compressed"), [("compressed", True), ("COMPRESSED", True), (None, True), ("frozen", False)])
def test_status_is_what_the_config_says(status, compressed):
    said = {**_compressed("pack-quantized", WEIGHTS), "quantization_status": status}
    assert read_quantization(_release(said)).is_compressed is compressed


def test_the_config_of_the_text_half_counts_where_the_top_has_none():
    release = Release(None, (), config={"text_config": {"quantization_config": {"quant_method": "awq"}}})
    assert read_quantization(release).method == "awq"
