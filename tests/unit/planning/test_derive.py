"""A config made of a run's args: the one the model was trained with, or a refusal that says what is left open."""

import pytest
from transformers import AutoConfig

from reports.errors import RequestError
from tasks.engine.families.families import find_family
from tasks.engine.formats.megatron_facts import stated_facts
from tasks.engine.planning.derive import derive_config
from tasks.engine.planning.stated import check_stated

DECODER = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 6,
    "ffn_hidden_size": 24,
    "vocab_size": 90,
    "max_position_embeddings": 32,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "use_rope_scaling": False,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
}
GPT2 = DECODER | {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True}
GPT2 |= {"bias_gelu_fusion": True, "kv_channels": 4, "group_query_attention": False, "untie_embeddings_and_output_weights": False}
MOE = DECODER | {"num_experts": 4, "moe_ffn_hidden_size": 10, "moe_router_topk": 2, "moe_router_pre_softmax": False}


@pytest.mark.parametrize(
    ("args", "model_type", "fields"),
    [
        (DECODER, "llama", {"num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
        (DECODER | {"add_qkv_bias": True}, "qwen2", {"vocab_size": 90}),
        (DECODER | {"qk_layernorm": True}, "qwen3", {"hidden_act": "silu"}),
        (MOE, "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 10}),
        (GPT2, "gpt2", {"n_embd": 16, "n_inner": 24, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-6}),
        (GPT2 | {"bias_gelu_fusion": False}, "gpt2", {"activation_function": "gelu"}),
    ],
)
def test_transformers_reads_the_derived_config_as_it_was_trained(args, model_type, fields):
    config = derive_config(stated_facts(args))
    read = AutoConfig.for_model(**config)
    assert read.model_type == model_type
    assert {name: getattr(read, name) for name in fields} == fields
    assert (read.bos_token_id, read.eos_token_id) == (None, None)
    family = find_family(config)
    assert family is not None
    check_stated(stated_facts(args), config, family.dims(config))


def test_llama3_scaling_takes_megatrons_constants():
    args = DECODER | {"use_rope_scaling": True, "rope_scaling_factor": 8.0}
    rope = derive_config(stated_facts(args))["rope_parameters"]
    assert isinstance(rope, dict)
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)


def test_nothing_stated_derives_nothing():
    assert derive_config({}) == {}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (DECODER | {"vocab_size": None}, "leaves open vocab"),
        (DECODER | {"multi_latent_attention": True, "normalization": "LayerNorm"}, "does not tell the model's kind"),
        (DECODER | {"qk_layernorm": True, "add_qkv_bias": True}, "does not tell the model's kind"),
        (MOE | {"moe_shared_expert_intermediate_size": 8}, "does not tell the model's kind"),
        (MOE | {"moe_layer_freq": 2}, "does not tell the model's kind"),
        (MOE | {"moe_router_pre_softmax": True}, "does not tell the model's kind"),
    ],
)
def test_what_args_do_not_tell_is_refused(args, said):
    with pytest.raises(RequestError, match=said):
        derive_config(stated_facts(args))
