"""A config that contradicts what the trainer stored with the weights is refused, field by field; honest ones pass."""

import pytest

from reports.errors import RequestError
from tasks.engine.families.families import find_family
from tasks.engine.formats.megatron_facts import stated_facts
from tasks.engine.planning.stated import check_stated
from tests.builders.megatron import Grid, Model, config, write_args

LLAMA = config(Model()) | {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
MIXTRAL = config(Model(experts=4)) | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2}
ROPE = {"position_embedding_type": "rope", "rotary_base": 10000, "use_rope_scaling": False, "layernorm_epsilon": 1e-5}
MOE = ROPE | {
    "rotary_base": 1000000,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_ffn_hidden_size": 12,
    "ffn_hidden_size": 99,
}
FUSED_GELU = {"swiglu": False, "bias_gelu_fusion": True, "num_layers": 2, "ffn_hidden_size": 32, "num_attention_heads": 2}
FUSED_GELU |= {"group_query_attention": False, "kv_channels": 4, "untie_embeddings_and_output_weights": False}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 10, "n_inner": 32}


def _check(args: dict, written: dict) -> None:
    family = find_family(written)
    assert family is not None
    check_stated(stated_facts(args), written, family.dims(written))


def _args(model: Model, **changed: object) -> dict:
    return vars(write_args(model, Grid(args=changed)))


@pytest.mark.parametrize(
    ("model", "args", "written"),
    [
        (Model(), ROPE, LLAMA),
        (Model(), ROPE | {"norm_epsilon": 1e-5, "layernorm_epsilon": None}, LLAMA),  # until core 0.15
        (Model(), ROPE | {"vocab_size": 12345}, LLAMA),  # args may count the tokenizer's ids only
        (Model(), ROPE, LLAMA | {"rope_parameters": {"rope_theta": 10000, "rope_type": "yarn", "factor": 4.0}}),  # stretched on purpose
        (Model(), ROPE, {**LLAMA, "rope_parameters": None, "rope_theta": 10000.0}),  # transformers 4
        (Model(), {}, LLAMA | {"rms_norm_eps": 1e-6}),  # args say nothing of it
        (Model(experts=4), MOE, MIXTRAL),
    ],
)
def test_a_config_of_the_model_passes(model, args, written):
    _check(_args(model, **args), written)


@pytest.mark.parametrize(
    ("model", "args", "written", "said"),
    [
        (Model(), ROPE, LLAMA | {"rms_norm_eps": 1e-6}, "eps is 1e-06 in the config, 1e-05 in the checkpoint"),
        (Model(), ROPE, LLAMA | {"rope_parameters": {"rope_theta": 500000.0}}, "rope_theta is 500000.0"),
        (Model(), ROPE, LLAMA | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3"}}, "rope_type is llama3"),
        (Model(), ROPE | {"use_rope_scaling": True}, LLAMA, "rope_type is default in the config, llama3"),
        (Model(), ROPE, LLAMA | {"num_attention_heads": 2, "head_dim": 4}, "num_heads is 2 in the config, 4"),
        (Model(), ROPE, LLAMA | {"num_attention_heads": 2, "head_dim": 4}, "head_dim is 4 in the config, 2"),
        (Model(), ROPE, LLAMA | {"num_key_value_heads": 4}, "num_kv_heads is 4"),
        (Model(), ROPE, LLAMA | {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (Model(), ROPE, LLAMA | {"num_hidden_layers": 3}, "num_layers is 3"),
        (Model(experts=4), MOE, MIXTRAL | {"num_experts_per_tok": 1}, "experts_per_token is 1"),
        (Model(experts=4), MOE, MIXTRAL | {"norm_topk_prob": False}, "norm_topk is False"),
        (Model(), FUSED_GELU, GPT2 | {"activation_function": "gelu"}, "gelu is erf in the config, tanh in the checkpoint"),
    ],
)
def test_a_contradiction_is_named_with_both_values(model, args, written, said):
    with pytest.raises(RequestError) as refused:
        _check(_args(model, **args), written)
    assert said in str(refused.value)
