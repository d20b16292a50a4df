"""The config check on configs as they were published, and on headers that fit them or do not."""

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.builders.headers import codes_of, planned_release
from validators.config import DIMS, NAMED_ALIKE, examine, read_field
from validators.expectation import Evidence

# Fields of config.json as published on the Hugging Face hub, in the spelling of the transformers of their day.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-05,
    "vocab_size": 50257,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# Some of the shapes in their published headers; the last layer and expert are among them.
HEADERS = {
    "llama": (
        LLAMA_3_1_8B,
        {
            "model.embed_tokens.weight": (128256, 4096),
            "model.layers.31.self_attn.q_proj.weight": (4096, 4096),
            "model.layers.31.self_attn.k_proj.weight": (1024, 4096),
            "model.layers.31.self_attn.o_proj.weight": (4096, 4096),
            "model.layers.31.mlp.down_proj.weight": (4096, 14336),
        },
    ),
    "gpt2": (
        GPT2,
        {
            "transformer.wte.weight": (50257, 768),
            "transformer.h.11.attn.c_attn.weight": (768, 2304),
            "transformer.h.11.mlp.c_fc.weight": (768, 3072),
        },
    ),
    "qwen3_moe": (
        QWEN3_30B_A3B,
        {
            "model.embed_tokens.weight": (151936, 2048),
            "model.layers.47.self_attn.q_proj.weight": (4096, 2048),
            "model.layers.47.self_attn.k_proj.weight": (512, 2048),
            "model.layers.47.mlp.experts.127.gate_proj.weight": (768, 2048),
            "model.layers.47.mlp.experts.127.down_proj.weight": (2048, 768),
            "model.layers.47.mlp.gate.weight": (128, 2048),
        },
    ),
}


def judge(config, shapes, dtype="BF16"):
    """Return the check's outcome for a config beside headers."""
    return examine(Evidence(planned_release(shapes, dtype=dtype, config=config)))


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_published_config_fits_its_published_headers(name):
    outcome = judge(*HEADERS[name])
    assert codes_of(outcome) == []
    assert outcome.examined > len(HEADERS[name][1])


@pytest.mark.parametrize(
    ("name", "field", "value", "code"),
    [
        ("llama", "num_hidden_layers", 31, "config.layers"),
        ("llama", "num_key_value_heads", 32, "config.kv-heads"),
        ("llama", "torch_dtype", "float16", "config.dtype"),
        ("llama", "rms_norm_eps", "1e-5", "config.eps"),
        ("llama", "rms_norm_eps", float("nan"), "config.eps"),
        ("gpt2", "n_layer", 24, "config.layers"),
        ("gpt2", "n_head", 12.5, "config.heads"),
        ("gpt2", "n_inner", 1024, "config.intermediate"),
        ("gpt2", "vocab_size", 50304, "config.vocabulary"),
        ("qwen3_moe", "num_experts", 64, "config.experts"),
        ("qwen3_moe", "moe_intermediate_size", 1536, "config.intermediate"),
        ("qwen3_moe", "head_dim", 64, "config.heads"),
    ],
)
def test_wrong_field_is_named(name, field, value, code):
    config, shapes = HEADERS[name]
    assert code in codes_of(judge(config | {field: value}, shapes))


def test_unknown_model_type_is_judged_only_by_what_does_not_need_its_names():
    config = LLAMA_3_1_8B | {"model_type": "exotic", "hidden_size": 1}
    assert codes_of(judge(config, HEADERS["llama"][1])) == []
    assert "exotic" not in DIMS


def test_text_config_counts_where_the_top_level_says_nothing():
    nested = {"text_config": {"vocab_size": 7}, "vocab_size": None}
    assert read_field(nested, "vocab_size") == 7
    assert read_field(nested | {"vocab_size": 8}, "vocab_size") == 8
    assert read_field({}, "vocab_size") is None


def test_both_spellings_of_rope_that_agree_are_sound():
    both = {"rope_parameters": {"rope_theta": 500000.0, **LLAMA_3_1_8B["rope_scaling"]}}
    assert codes_of(judge(LLAMA_3_1_8B | both, HEADERS["llama"][1])) == []


def test_rope_per_layer_type_is_not_mistaken_for_a_missing_base():
    per_type = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "rope_theta": None}
    assert codes_of(judge(LLAMA_3_1_8B | per_type | {"rope_scaling": None}, HEADERS["llama"][1])) == []


def test_same_wrong_field_in_every_layer_is_one_finding_in_the_report():
    shapes = {f"model.layers.{i}.self_attn.k_proj.weight": (1024, 4096) for i in range(32)}
    findings = set(judge(LLAMA_3_1_8B | {"num_key_value_heads": 4}, shapes).findings)
    assert [(found.expected, found.found) for found in findings] == [("512", "1024 in dim 0 of model.layers.*.self_attn.k_proj.weight")]


def judge_names(**config):
    """Return what the check says of a config without tensors."""
    return examine(Evidence(planned_release({}, config=config)))


def test_no_class_that_transformers_pairs_with_a_model_type_is_taken_for_another():
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    pairs = [(kind, name) for table in tables for kind, names in table.items() for name in ([names] if isinstance(names, str) else names)]
    assert len(pairs) > 1000
    assert [pair for pair in pairs if codes_of(judge_names(model_type=pair[0], architectures=[pair[1]]))] == []


@pytest.mark.parametrize("model_type", sorted(NAMED_ALIKE))
def test_every_model_type_named_alike_is_known_to_transformers(model_type):
    assert model_type in CONFIG_MAPPING_NAMES


@pytest.mark.parametrize(
    ("model_type", "name", "codes"),
    [
        ("llama", "Qwen2ForCausalLM", ["config.architecture-differs"]),
        ("qwen2", "Qwen2MoeForCausalLM", ["config.architecture-differs"]),
        ("gpt2", "OPTForSequenceClassification", ["config.architecture-differs"]),
        ("llama", "LLaMAForCausalLM", []),
        ("llama", "LlamaForCausalLMEagle3", []),
        ("llama", "AcmeForCausalLM", []),
        ("acme", "LlamaForCausalLM", []),
        ("llama", 7, []),
    ],
)
def test_architecture_is_judged_when_it_is_another_known_models(model_type, name, codes):
    assert codes_of(judge_names(model_type=model_type, architectures=[name])) == codes


def test_custom_code_may_name_its_classes_as_it_likes():
    auto_map = {"AutoModelForCausalLM": "modeling_own.Qwen2ForCausalLM"}
    assert codes_of(judge_names(model_type="llama", architectures=["Qwen2ForCausalLM"], auto_map=auto_map)) == []
