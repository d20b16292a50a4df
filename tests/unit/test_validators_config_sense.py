"""What a config says by itself: honest fields as published, and what they must not be."""

import pytest

from validators.config_sense import judge_sense

LLAMA3 = {
    "rope_type": "llama3",
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
# Fields of config.json as published on the Hugging Face hub.
HONEST = {
    "llama_3_1": {"hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rope_scaling": LLAMA3},
    "llama_1": {"hidden_act": "silu", "pad_token_id": -1, "rope_scaling": None},
    "gpt2": {"activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256},
    "gemma_2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None, "pad_token_id": 0},
    "qwen2_vl": {"rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}},
    "deepseek_v3": {
        **{"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "mscale": 1.0, "original_max_position_embeddings": 4096},
    },
    "phi_3": {
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1.05, 1.05], "long_factor": [1.03, 31.5]},
    },
    "gemma_3": {
        "text_config": {
            **{"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            "rope_parameters": {
                "full_attention": {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        }
    },
    "step_3_5": {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "layer_types": ["full_attention"] * 4},
    "own_code": {"auto_map": {"AutoModel": "m.M"}, "hidden_act": "polynorm", "layer_types": ["x"], "num_hidden_layers": 4},
    "mamba": {"hidden_act": "silu", "n_group": None, "n_groups": 8},
}
HONEST_GENERATION = (
    {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
    {"do_sample": False, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0},
    {"forced_bos_token_id": 250004, "forced_eos_token_id": [2], "max_length": 1024, "num_beams": 5},
    {"min_length": 30, "max_length": 20, "max_new_tokens": 60},  # max_new_tokens counts, whatever max_length says
)


def faults(config, generation=None):
    return [(found.code, found.where) for found in judge_sense(config, generation or {}) if found is not None]


@pytest.mark.parametrize("name", HONEST)
def test_a_published_config_makes_sense(name):
    assert faults(HONEST[name]) == []


@pytest.mark.parametrize("generation", HONEST_GENERATION)
def test_honest_sampling_fields_pass(generation):
    assert faults({"vocab_size": 250027}, generation) == []


def test_every_activation_and_rope_type_of_transformers_is_known():
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert [name for name in ACT2FN if faults({"hidden_act": name})] == []
    codes = {code for kind in ROPE_INIT_FUNCTIONS for code, _ in faults({"rope_scaling": {"type": kind}})}
    assert "config.rope-type" not in codes


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama3_needs_each_of_its_fields(spelling, field):
    rope = {key: value for key, value in LLAMA3.items() if key != field}
    assert faults({spelling: rope}) == [("config.rope-field-missing", f"config.json: {spelling}")]


def test_a_type_of_layer_is_named_with_its_rope():
    rope = {"full_attention": {"rope_type": "yarn", "factor": 0}, "sliding_attention": {"rope_type": "default"}, "rope_theta": 1e4}
    assert faults({"text_config": {"rope_parameters": rope}}) == [
        ("config.rope-range", "config.json: text_config.rope_parameters.full_attention.factor")
    ]


@pytest.mark.parametrize("factor", [0, -4.0, float("nan"), float("inf"), True, "8.0", [8.0], 10**400])
def test_a_factor_that_is_no_positive_number_is_named(factor):
    assert faults({"rope_scaling": {"type": "linear", "factor": factor}}) == [("config.rope-range", "config.json: rope_scaling.factor")]


@pytest.mark.parametrize("kind", ["lama3", "", ["yarn"], 3])
def test_an_unknown_rope_type_is_named_whatever_it_is(kind):
    assert faults({"rope_scaling": {"rope_type": kind, "factor": 2.0}}) == [("config.rope-type", "config.json: rope_scaling")]


@pytest.mark.parametrize("value", ["</s>", 2.0, True, [2, "</s>"], {"id": 2}])
def test_a_special_id_that_is_no_whole_number_is_named(value):
    assert faults({"eos_token_id": value}) == [("config.token-id-type", "config.json: eos_token_id")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, "0.7", float("nan"), float("inf"), True)),
        *(("top_p", value) for value in (0, -0.5, 1.01, 95)),
        *(("min_p", value) for value in (-0.1, 2)),
        *(("top_k", value) for value in (-1, "50")),
        *(("repetition_penalty", value) for value in (0, -1.2)),
        *(("num_beams", 0), ("max_new_tokens", 0)),
    ],
)
def test_a_sampling_field_out_of_range_is_named(field, value):
    assert faults({}, {field: value}) == [("config.generation-range", f"generation_config.json: {field}")]


@pytest.mark.parametrize("fields", [{"min_length": 21, "max_length": 20}, {"min_new_tokens": 9, "max_new_tokens": 8}])
def test_a_shortest_above_the_longest_is_named(fields):
    assert faults({}, fields) == [("config.generation-lengths", f"generation_config.json: {next(iter(fields))}")]


@pytest.mark.parametrize("value", [100, -1, [3, 100]])
def test_a_forced_token_beyond_the_vocabulary_is_named(value):
    assert faults({"text_config": {"vocab_size": 100}}, {"forced_eos_token_id": value}) == [
        ("config.forced-token", "generation_config.json: forced_eos_token_id")
    ]
