"""Planted faults that config.json or generation_config.json shows by itself."""

from tests.faults.faults_in_structure import config, generation, set_rope
from tests.faults.planting import Fault

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

ROPE = (
    Fault("rope_type_unknown", "dense", "config.rope-type", set_rope(rope_type="lama3")),
    Fault("rope_type_unknown_in_old_spelling", "tied", "config.rope-type", config(rope_scaling={"type": "liner", "factor": 2.0})),
    Fault("rope_llama3_without_fields", "dense", "config.rope-field-missing", set_rope(rope_type="llama3", factor=8.0)),
    Fault("rope_yarn_without_factor", "dense", "config.rope-field-missing", set_rope(rope_type="yarn")),
    Fault("rope_linear_without_factor", "moe", "config.rope-field-missing", config(rope_scaling={"type": "linear"})),
    Fault("rope_longrope_without_long", "dense", "config.rope-field-missing", set_rope(rope_type="longrope", short_factor=[1.0] * 4)),
    Fault("rope_factor_negative", "dense", "config.rope-range", set_rope(rope_type="dynamic", factor=-2.0)),
    Fault("rope_factor_a_text", "dense", "config.rope-range", set_rope(rope_type="yarn", factor="4.0")),
    Fault("rope_frequencies_crossed", "dense", "config.rope-range", set_rope(rope_type="llama3", **_LLAMA3 | {"low_freq_factor": 4.0})),
    Fault(
        "rope_longrope_lengths_differ",
        "dense",
        "config.rope-range",
        set_rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 3),
    ),
)

CONFIG = (
    Fault("activation_misspelt", "dense", "config.activation", config(hidden_act="sillu")),
    Fault("activation_nested_unknown", "moe", "config.activation", config(text_config={"hidden_act": "gelu_tanh_new"})),
    Fault("layer_types_short", "dense", "config.layer-types", config(layer_types=["full_attention"] * 3)),
    Fault("groups_do_not_divide_experts", "router_bias", "config.expert-groups", config(n_group=3)),
    Fault("more_groups_chosen_than_there_are", "router_bias", "config.expert-groups", config(n_group=2, topk_group=4)),
    Fault("eos_a_text", "dense", "config.token-id-type", config(eos_token_id="</s>")),
    Fault("bos_a_text_in_generation", "tied", "config.token-id-type", generation(bos_token_id="<s>")),
)

GENERATION = (
    Fault("temperature_negative", "dense", "config.generation-range", generation(do_sample=True, temperature=-0.7)),
    Fault("top_p_a_percentage", "dense", "config.generation-range", generation(do_sample=True, top_p=95)),
    Fault("top_k_negative", "moe", "config.generation-range", generation(do_sample=True, top_k=-50)),
    Fault("repetition_penalty_zero", "tied", "config.generation-range", generation(repetition_penalty=0)),
    Fault("forced_token_beyond_vocabulary", "dense", "config.forced-token", generation(forced_eos_token_id=320)),
    Fault("shortest_above_longest", "dense", "config.generation-lengths", generation(min_length=200, max_length=100)),
)

FAULTS = (*ROPE, *CONFIG, *GENERATION)
