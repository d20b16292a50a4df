"""Sound quantized folders pass without a word, whatever the encoding, the model, and the dtype of what is not quantized."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.builders.editing import edit_json, edit_tensors, set_fields
from tests.builders.quantized import ENCODINGS, is_linear, quantization_config, quantize_linear, quantize_release, quantize_weight
from tests.builders.releases import SoundRelease, header_shapes
from tests.faults.faults_in_weights import cast
from tests.faults.planting import gather, judge_all, refer_to
from tests.faults.test_controls import assert_sound
from validators.quantized_names import expect_stored
from validators.release import open_release

FORMATS = sorted(ENCODINGS)


def _findings(results):
    return [finding for result in results for finding in result.findings]


def _standalone(evidence, **without):
    return replace(evidence, plan=None, values=None, parts=evidence.parts.assign(relative_error=float("nan")), **without)


@pytest.mark.parametrize("name", ["dense", "tied", "moe", "router_bias"])
@pytest.mark.parametrize("encoding", FORMATS)
def test_sound_quantized_release_has_no_finding_at_all(encoding, name, sound, tmp_path):
    made = quantize_release(sound[name], encoding, tmp_path / "release", with_cache=encoding in ("fp8_tensor", "int4_group"))
    results = judge_all(gather(made.folder, made.source, made))
    assert_sound(results)
    assert _findings(results) == []
    quantized = next(result for result in results if result.check == "quantized")
    assert quantized.examined == sum(is_linear(name) for name in sound[name].expected.shapes)
    assert 0 < quantized.measured["largest_relative_error"] < 0.14


@pytest.mark.parametrize("encoding", FORMATS)
def test_sound_quantized_release_passes_without_source_and_without_family(encoding, sound, tmp_path):
    made = quantize_release(sound["moe"], encoding, tmp_path / "release")
    evidence = gather(made.folder, made.source, made)
    assert _findings(judge_all(_standalone(evidence))) == []
    assert _findings(judge_all(_standalone(evidence, expected=None))) == []


@pytest.mark.parametrize("encoding", ["fp8_channel", "fp8_inverse", "int4_group_asymmetric"])
@pytest.mark.parametrize("name", ["dense", "router_bias"])
def test_honest_cast_beside_quantized_weights_passes(name, encoding, sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound[name].folder, folder)
    cast(torch.bfloat16, *sound[name].expected.keep_fp32)(folder)
    set_fields(folder / "config.json", dtype="bfloat16")
    edit_tensors(folder, lambda held: quantize_linear(held, ENCODINGS[encoding]))
    set_fields(folder / "config.json", quantization_config=quantization_config(ENCODINGS[encoding], sound[name]))
    made = SoundRelease(name, folder, sound[name].expected, source=sound[name].folder)
    results = judge_all(gather(folder, made.source, made, dtype="BF16"))
    assert {result.check: result.reason for result in results if result.status in {"errored", "failed"}} == {}
    assert {finding.code for finding in _findings(results)} <= {"quantized.calibrated-error"}


@pytest.mark.parametrize("name", ["dense", "moe", "router_bias"])
@pytest.mark.parametrize("encoding", FORMATS)
def test_expectation_follows_the_quantization_as_the_folder_has_it(encoding, name, sound, tmp_path):
    made = quantize_release(sound[name], encoding, tmp_path / "release")
    stored = {key: shape for path in made.folder.glob("*.safetensors") for key, shape in header_shapes(path).items()}
    expected = expect_stored(made.expected, open_release(made.folder))
    assert dict(expected.shapes) == stored
    assert set(expected.quantized) == {key for key in made.expected.shapes if is_linear(key)}


def test_groups_of_two_encodings_and_a_quantized_head_pass(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["dense"].folder, folder)
    four, eight = ENCODINGS["int4_group"], ENCODINGS["int8_w8a8"]

    def change(held):
        attention = {name: held.pop(name) for name in list(held) if ".self_attn." in name and is_linear(name)}
        head = {"lm_head.q_proj.weight": held.pop("lm_head.weight")}  # under a name that the builder quantizes
        quantize_linear(held, four)
        quantize_linear(attention, eight)
        quantize_linear(head, eight)
        held.update(attention | {name.replace("q_proj.", ""): part for name, part in head.items()})

    edit_tensors(folder, change)
    groups = {
        "group_0": {"targets": [r"re:.*self_attn\..*_proj$", "lm_head"], "weights": eight.weights, "format": eight.format},
        "group_1": {"targets": ["Linear"], "weights": four.weights, "format": four.format},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": []}
    set_fields(folder / "config.json", quantization_config=config)
    made = SoundRelease("dense", folder, sound["dense"].expected, source=sound["dense"].folder)
    assert _findings(judge_all(gather(folder, made.source, made))) == []


def test_static_scales_and_the_older_names_of_the_cache_pass(sound, tmp_path):
    made = quantize_release(sound["dense"], "fp8_tensor", tmp_path / "release")
    static = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}

    def change(held):
        for name in [name for name in held if name.endswith(".weight_scale")]:
            module = name.removesuffix(".weight_scale")
            held[f"{module}.input_scale"] = torch.tensor([0.02])
            if module.endswith((".k_proj", ".v_proj")):
                held[f"{module}.output_scale"] = torch.tensor([0.04])

    edit_tensors(made.folder, change)
    edit_json(
        made.folder / "config.json",
        lambda value: (
            value["quantization_config"]["config_groups"]["group_0"].update(input_activations=static),
            value["quantization_config"].update(kv_cache_scheme=static),
        ),
    )
    assert _findings(judge_all(gather(made.folder, made.source, made))) == []


def _gptq(weight):
    columns, groups = weight.shape[1], weight.shape[1] // 8
    return {
        "qweight": torch.randint(-(2**31), 2**31, (columns // 8, weight.shape[0]), dtype=torch.int32),
        "qzeros": torch.full((groups, weight.shape[0] // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.rand(groups, weight.shape[0]).to(torch.float16) + 0.01,
        "g_idx": torch.arange(columns, dtype=torch.int32) // 8,
    }


def _awq(weight):
    return {suffix: part for suffix, part in _gptq(weight).items() if suffix != "g_idx"}


def _bitsandbytes(weight):
    return {
        "weight": torch.randint(0, 255, (weight.numel() // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.rand(weight.numel() // 64) + 0.1,
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.randint(0, 255, (90,), dtype=torch.uint8),
    }


def _nvfp4(weight):
    return {
        "weight_packed": torch.randint(0, 255, (weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8),
        "weight_scale": (torch.rand(weight.shape[0], weight.shape[1] // 8) + 0.1).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([3.5]),
        "input_global_scale": torch.tensor([1.5]),
    }


def _store(held, store):
    for key in [key for key in held if is_linear(key)]:
        module = key.removesuffix(".weight")
        held.update({f"{module}.{suffix}": part for suffix, part in store(held.pop(key)).items()})


NVFP4 = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}
UNJUDGED = {
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True}),
    "bitsandbytes": (_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nvfp4": (
        _nvfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": NVFP4},
            "ignore": ["lm_head"],
        },
    ),
}


@pytest.mark.parametrize("method", sorted(UNJUDGED))
@pytest.mark.parametrize("name", ["dense", "router_bias"])
def test_a_method_that_is_not_judged_is_named_and_never_an_error(name, method, sound, tmp_path):
    store, config = UNJUDGED[method]
    folder = tmp_path / "release"
    shutil.copytree(sound[name].folder, folder)
    torch.manual_seed(3)

    edit_tensors(folder, lambda held: _store(held, store))
    routers = [key.removesuffix(".weight") for key in sound[name].expected.shapes if key.endswith("mlp.gate.weight")]
    if "ignore" in config:
        config = json.loads(json.dumps(config))
        config["ignore"] += routers
    set_fields(folder / "config.json", quantization_config=config)
    made = SoundRelease(name, folder, sound[name].expected, source=sound[name].folder)
    for evidence in (gather(folder, made.source, made), _standalone(gather(folder, made.source, made))):
        results = judge_all(evidence)
        assert {result.check: result.findings for result in results if result.status in {"errored", "failed"}} == {}
        assert {finding.code for finding in _findings(results)} == {"quantized.not-judged"}


def test_weights_that_are_quantized_when_loaded_are_stored_whole(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["dense"].folder, folder)
    config = quantization_config(ENCODINGS["fp8_channel"], sound["dense"]) | {"format": "dense", "quantization_status": "frozen"}
    set_fields(folder / "config.json", quantization_config=config)
    results = judge_all(gather(folder, sound["dense"].folder, sound["dense"]))
    assert_sound(results)
    assert {finding.code for finding in _findings(results)} == {"quantized.not-judged"}


@pytest.mark.parametrize("earlier", ["whole", "quantized"])
def test_an_earlier_release_may_be_quantized_or_not(earlier, sound, tmp_path):
    made = quantize_release(sound["moe"], "int4_group", tmp_path / "before")
    folder = tmp_path / "release"
    shutil.copytree(sound["moe"].folder, folder)
    edit_tensors(folder, lambda held: held.update({name: value * 1.01 for name, value in held.items()}))
    edit_tensors(folder, lambda held: quantize_linear(held, ENCODINGS["int4_group"]))
    set_fields(folder / "config.json", quantization_config=quantization_config(ENCODINGS["int4_group"], sound["moe"]))
    reference = refer_to(made.folder if earlier == "quantized" else sound["moe"].folder, retrained=True)
    evidence = replace(_standalone(gather(folder, sound["moe"].folder, made)), reference=reference)
    assert _findings(judge_all(evidence)) == []


def _fp8(weight):
    return quantize_weight(weight, ENCODINGS["fp8_channel"])


@pytest.mark.parametrize(("name", "store"), [("hf_quant_config.json", _fp8), ("quantize_config.json", _gptq), ("quant_config.json", _awq)])
def test_a_method_may_be_declared_in_a_file_of_its_own(name, store, sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["dense"].folder, folder)
    edit_tensors(folder, lambda held: _store(held, store))
    (folder / name).write_text("{}")
    made = SoundRelease("dense", folder, sound["dense"].expected, source=sound["dense"].folder)
    results = judge_all(_standalone(gather(folder, made.source, made)))
    assert {finding.code for finding in _findings(results)} == {"quantized.not-judged"}


def test_scales_that_are_powers_of_two_pass(sound, tmp_path):
    made = quantize_release(sound["router_bias"], "fp8_inverse", tmp_path / "release")
    source = load_file(made.source / "model.safetensors")

    def change(held):
        for name in [name for name in held if name.endswith("_scale_inv")]:
            exact, weight = held[name].log2().ceil().exp2(), name.replace("_scale_inv", "")
            rows, columns = held[weight].shape
            over = exact.repeat_interleave(16, 0).repeat_interleave(32, 1)[:rows, :columns]
            held.update({weight: (source[weight] / over).to(torch.float8_e4m3fn), name: exact.to(torch.float8_e8m0fnu)})

    edit_tensors(made.folder, change)
    assert _findings(judge_all(gather(made.folder, made.source, made))) == []


def test_a_whole_model_may_have_parameters_of_any_name(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["dense"].folder, folder)
    extra = ("scales", "g_idx", "SCB", "k_scale", "input_scale", "weight_g", "weight_v")
    edit_tensors(folder, lambda held: held.update({f"model.layers.0.mlp.{name}": torch.rand(8) for name in extra}))
    results = judge_all(_standalone(gather(folder, folder, sound["dense"])))
    assert [finding.code for finding in _findings(results) if finding.code.startswith("quantized.")] == []


@pytest.mark.parametrize(
    "ignored", [["lm_head", "Embedding"], ["re:.*head$"], ["lm_head", "model.layers.0.input_layernorm", "model.layers.1"]]
)
def test_ignore_lists_may_name_classes_patterns_and_whole_blocks(ignored, sound, tmp_path):
    made = quantize_release(sound["dense"], "int4_group", tmp_path / "release")
    edit_json(made.folder / "config.json", lambda value: value["quantization_config"].update(ignore=ignored))
    assert _findings(judge_all(gather(made.folder, made.source, made))) == []


def test_layers_left_whole_on_purpose_pass(sound, tmp_path):
    made = quantize_release(sound["moe"], "int4_group", tmp_path / "release")
    kept = {name: tensor for path in sound["moe"].folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    def change(held):
        for name in [name for name in held if name.startswith("model.layers.1.") and "_proj.weight_" in name]:
            held.pop(name)
        held.update({name: tensor for name, tensor in kept.items() if name.startswith("model.layers.1.")})

    edit_tensors(made.folder, change)
    edit_json(made.folder / "config.json", lambda value: value["quantization_config"]["ignore"].append(r"re:model\.layers\.1\..*"))
    assert _findings(judge_all(gather(made.folder, made.source, made))) == []


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_fp8_with_one_scale_per_tensor_or_row_passes(per, sound, tmp_path):
    made = quantize_release(sound["dense"], "fp8_tensor" if per == "tensor" else "fp8_channel", tmp_path / "release")
    said = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    if per == "row":
        said = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}

    def change(held):
        for name in [name for name in held if name.endswith("weight_scale")]:
            if per == "tensor":
                held.update({name: held[name].reshape(()), name.replace("weight_scale", "input_scale"): torch.tensor(0.5)})

    edit_tensors(made.folder, change)
    set_fields(made.folder / "config.json", quantization_config=said)
    assert _findings(judge_all(gather(made.folder, made.source, made))) == []
