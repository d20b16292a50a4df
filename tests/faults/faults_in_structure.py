"""Planted faults of tied embeddings, experts, config, tokenizer and logits. Numbers in comments are rows of the public catalogue."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.builders.editing import edit_json, set_fields, write_json
from tests.faults.faults_in_weights import EMBEDDING, HEAD, K, Q, assign, interleave_rope, leave, set_at, swap, tensors
from tests.faults.planting import Fault
from validators.expectation import Evidence

EXPERTS = "model.layers.0.mlp.experts."
ROUTER = "model.layers.0.mlp.gate.weight"


def config(**fields: object) -> Callable[[Path], None]:
    """Return a planter that sets fields of config.json; None removes one."""
    return lambda folder: set_fields(folder / "config.json", **fields)


def generation(**fields: object) -> Callable[[Path], None]:
    """Return a planter that sets fields of generation_config.json."""
    return lambda folder: set_fields(folder / "generation_config.json", **fields)


def tokenizer(**fields: object) -> Callable[[Path], None]:
    """Return a planter that sets fields of tokenizer_config.json."""
    return lambda folder: set_fields(folder / "tokenizer_config.json", **fields)


def set_rope(**fields: object) -> Callable[[Path], None]:
    """Return a planter that sets fields of the config's rope_parameters."""
    return lambda folder: edit_json(folder / "config.json", lambda value: value["rope_parameters"].update(fields))


def copy(source: str, target: str) -> Callable[[Path], None]:
    """Return a planter that gives every tensor with `target` in its name the values of that with `source`."""
    return tensors(lambda held: held.update({n: held[n.replace(target, source)] for n in held if target in n}))


def remove(part: str) -> Callable[[Path], None]:
    """Return a planter that removes every tensor with `part` in its name."""
    return tensors(lambda held: [held.pop(name) for name in list(held) if part in name])


def store(name: str, like: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Return a planter that stores a new tensor made of another."""
    return tensors(lambda held: held.update({name: make(held[like])}))


def feed_from_other_expert(evidence: Evidence) -> Evidence:
    """Return evidence whose plan takes experts 0 and 1 of layer 0 from a fused source, in the wrong order."""
    assert evidence.plan is not None
    plan = evidence.plan.copy()
    for target, source in (("0", 1), ("1", 0)):
        row = plan["name"] == f"{EXPERTS}{target}.down_proj.weight"
        plan.loc[row, "sources"] = f"{EXPERTS}down_proj[{source}:{source + 1},0:64,0:24]"
    return replace(evidence, plan=plan)


def add_token_beyond(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", lambda value: value["model"]["vocab"].update({"w320": 320}))


def change_comparison(**fields: object) -> Callable[[Evidence], Evidence]:
    """Return an amendment that sets fields of the first logits comparison."""
    return lambda evidence: replace(evidence, logits=(replace(evidence.logits[0], **fields),))


def special_map(**fields: object) -> Callable[[Path], None]:
    """Return a planter that writes special_tokens_map.json."""
    return lambda folder: write_json(folder / "special_tokens_map.json", fields)


def post_process(folder: Path) -> None:
    """Let tokenizer.json put an id before each text that is not the one of the token it names."""
    special = {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}]}
    set_fields(folder / "tokenizer.json", post_processor={**processor, "special_tokens": special})


TIED = (
    Fault("tied_head_perturbed", "tied", "tied.head-differs", store(HEAD, EMBEDDING, lambda t: t + 1e-3)),  # 33
    Fault("tied_flag_wrong", "dense", "tied.head-differs", config(tie_word_embeddings=True)),  # 28, 30
    Fault("tied_flag_set_by_mistake", "dense", "tied.flag-wrong", config(tie_word_embeddings=True)),
    Fault("untied_head_missing", "tied", "tied.head-missing", config(tie_word_embeddings=False)),  # 26
    Fault("head_lost", "dense", "tied.head-missing", remove(HEAD)),  # 26
    Fault("head_is_embedding", "dense", "tied.head-is-embedding", store(HEAD, EMBEDDING, torch.clone)),  # 29
    Fault("source_head_is_embedding", "dense", "tied.source-head-is-embedding", leave, prepare=store(HEAD, EMBEDDING, torch.clone)),
    Fault("only_alias_kept", "tied", "tied.kept-missing", tensors(lambda held: held.update({HEAD: held.pop(EMBEDDING)}))),  # 31
    Fault("tie_flags_disagree", "dense", "tied.flags-disagree", config(text_config={"tie_word_embeddings": True})),  # 27, 28
    Fault(
        "tie_flag_nested_only",
        "tied",
        "tied.flag-nested-only",
        config(tie_word_embeddings=None, text_config={"tie_word_embeddings": True}),
    ),  # 27
)

MOE = (
    Fault("missing_expert", "moe", "experts.missing", remove(f"{EXPERTS}3.")),  # 20, 22
    Fault(
        "expert_beyond_count",
        "moe",
        "experts.unexpected-id",
        store(f"{EXPERTS}4.up_proj.weight", f"{EXPERTS}0.up_proj.weight", torch.neg),
    ),
    Fault("expert_of_other_shape", "moe", "experts.shape", assign(f"{EXPERTS}2.down_proj.weight", lambda t: t[:, :20])),
    Fault("router_lost", "moe", "experts.router-missing", remove(ROUTER)),
    Fault("router_row_lost", "moe", "experts.router-rows", assign(ROUTER, lambda t: t[:3])),
    Fault("router_of_one_row", "moe", "experts.router-equal", assign(ROUTER, lambda t: t[:1].repeat(4, 1))),
    Fault("router_of_its_mean", "router_bias", "experts.router-equal", assign(ROUTER, lambda t: t.mean(0, keepdim=True).repeat(4, 1))),
    Fault("router_rank_read_twice", "moe", "experts.router-repeats", assign(ROUTER, lambda t: t[:2].repeat(2, 1))),
    Fault("router_row_lost", "router_bias", "experts.router-repeats", set_at(ROUTER, (3,), 0.0)),
    Fault("top_k_too_many", "moe", "experts.top-k", config(num_experts_per_tok=8)),
    Fault(
        "ep_local_ids", "moe", "experts.identical", lambda folder: [copy(f".experts.{e}.", f".experts.{e + 2}.")(folder) for e in (0, 1)]
    ),  # 19, 21
    Fault("ep_blocks_swapped", "moe", "experts.exchanged", swap((".experts.0.", ".experts.2."), (".experts.1.", ".experts.3."))),  # 20
    Fault("plan_feeds_wrong_expert", "moe", "experts.wrong-source", leave, amend=feed_from_other_expert),
    Fault("experts_in_dense_model", "dense", "experts.undeclared", store(f"{EXPERTS}0.up_proj.weight", Q, torch.clone)),
)

TOKENIZER = (
    Fault("tokenizer_too_big", "dense", "tokenizer.too-big", add_token_beyond),  # 37
    Fault(
        "tokenizer_cut_short", "dense", "tokenizer.unreadable", lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"')
    ),
    Fault("tokenizer_without_model", "dense", "tokenizer.unreadable", lambda folder: set_fields(folder / "tokenizer.json", model=None)),
    Fault("tokenizer_json_lost", "dense", "tokenizer.unreadable", lambda folder: (folder / "tokenizer.json").unlink()),
    Fault("eos_beyond_rows", "dense", "tokenizer.special-out-of-range", config(eos_token_id=[2, 999])),
    Fault("eos_not_in_vocabulary", "dense", "tokenizer.special-unknown", tokenizer(eos_token="<|nope|>")),
    Fault("eos_mismatch", "dense", "tokenizer.eos-mismatch", tokenizer(eos_token="<|im_end|>")),  # 65
    Fault("eos_mismatch_generation", "dense", "tokenizer.eos-mismatch", generation(eos_token_id=[7, 8])),  # 65
    Fault("bos_mismatch", "dense", "tokenizer.bos-mismatch", config(bos_token_id=4)),
    Fault("pad_mismatch", "dense", "tokenizer.pad-mismatch", generation(pad_token_id=9)),
    Fault("bos_of_special_tokens_map", "dense", "tokenizer.specials-differ", special_map(bos_token="<|im_start|>")),
    Fault("eos_of_special_tokens_map", "dense", "tokenizer.specials-differ", special_map(eos_token={"content": "<|im_end|>"})),  # 65
    Fault("pad_of_special_tokens_map", "dense", "tokenizer.padding-differs", special_map(pad_token="</s>")),
    Fault(
        "added_token_moved", "dense", "tokenizer.ids-differ", lambda folder: write_json(folder / "added_tokens.json", {"<|im_end|>": 299})
    ),
    Fault("added_token_on_a_taken_id", "dense", "tokenizer.ids-differ", tokenizer(added_tokens_decoder={"7": {"content": "<tool>"}})),
    Fault(
        "vocab_of_another_tokenizer", "dense", "tokenizer.ids-differ", lambda folder: write_json(folder / "vocab.json", {"<s>": 0, "w6": 6})
    ),
    Fault("post_processor_begins_with_another_id", "dense", "tokenizer.ids-differ", post_process),
    Fault("max_position_short", "dense", "tokenizer.max-length", config(max_position_embeddings=64)),  # 63
    Fault("chat_template_lost", "dense", "tokenizer.chat-template-lost", lambda folder: (folder / "chat_template.jinja").unlink()),  # 66
    Fault("chat_template_stale_inline", "dense", "tokenizer.chat-templates-differ", tokenizer(chat_template="{{ messages[0] }}")),
    Fault(
        "chat_template_stale_default",
        "dense",
        "tokenizer.chat-templates-differ",
        tokenizer(chat_template=[{"name": "default", "template": "x"}]),
    ),
    Fault(
        "chat_template_broken",
        "dense",
        "tokenizer.chat-template-broken",
        lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
    ),
)

CONFIG = (
    Fault("model_type_lost", "dense", "config.model-type", config(model_type=None)),
    Fault("architectures_lost", "dense", "config.architectures", config(architectures=[])),
    Fault("architecture_of_another_model", "dense", "config.architecture-differs", config(architectures=["Qwen2ForCausalLM"])),
    Fault("model_type_of_another_model", "moe", "config.architecture-differs", config(model_type="qwen3")),
    Fault("layers_cut", "dense", "config.layers", config(num_hidden_layers=3)),
    Fault("hidden_wrong", "dense", "config.hidden", config(hidden_size=128)),
    Fault("vocabulary_wrong", "dense", "config.vocabulary", config(vocab_size=32000)),
    Fault("heads_wrong", "dense", "config.heads", config(num_attention_heads=4)),
    Fault("kv_heads_wrong", "dense", "config.kv-heads", config(num_key_value_heads=8)),
    Fault("head_dim_wrong", "moe", "config.heads", config(head_dim=16)),
    Fault("intermediate_wrong", "tied", "config.intermediate", config(intermediate_size=97)),
    Fault("experts_wrong", "moe", "config.experts", config(num_local_experts=8)),
    Fault("experts_two_values", "moe", "config.spellings", config(num_experts=8)),
    Fault("rope_theta_two_values", "dense", "config.rope-spellings", config(rope_theta=500000.0)),
    Fault("rope_scaling_two_values", "dense", "config.rope-spellings", config(rope_scaling={"type": "linear", "factor": 4.0})),
    Fault("rope_theta_negative", "dense", "config.rope-theta", set_rope(rope_theta=-1)),
    Fault("rope_theta_text", "dense", "config.rope-theta", set_rope(rope_theta="10000")),
    Fault("rope_theta_for_new_readers_only", "dense", "config.rope-one-spelling", set_rope(rope_theta=500000.0)),  # 62
    Fault("eps_large", "dense", "config.eps", config(rms_norm_eps=0.1)),
    Fault("eps_zero", "dense", "config.eps", config(rms_norm_eps=0)),
    Fault("max_position_zero", "dense", "config.max-position", config(max_position_embeddings=0)),
    Fault("dtype_config_wrong", "dense", "config.dtype", config(dtype="bfloat16")),  # 45
    Fault("dtype_nested_wrong", "dense", "config.dtype", config(dtype=None, text_config={"torch_dtype": "float16"})),  # 45
    Fault("dtype_two_values", "dense", "config.dtype-spellings", config(torch_dtype="bfloat16")),
)

LOGITS = (
    Fault("rope_layout_in_logits", "dense", "logits.mean-kl", assign(Q, interleave_rope), logits="F32"),  # 9
    Fault("rope_scaling_added", "dense", "logits.mean-kl", set_rope(rope_type="linear", factor=4.0), logits="F32"),  # 64
    Fault("rope_theta_lost", "dense", "logits.mean-kl", set_rope(rope_theta=500.0), logits="F32"),  # 62
    Fault("eps_changed", "dense", "logits.mean-kl", config(rms_norm_eps=1e-3), logits="F32"),
    Fault("gate_up_in_logits", "dense", "logits.p95-kl", swap(("gate_proj", "up_proj")), logits="BF16"),  # 4
    Fault("kv_heads_in_logits", "dense", "logits.cosine", assign(K, lambda t: t[:8].repeat(2, 1)), logits="F32"),  # 14
    Fault("layers_in_logits", "dense", "logits.top1", swap((".layers.1.", ".layers.2.")), logits="BF16"),  # 17
    Fault("nan_in_logits", "dense", "logits.nonfinite", set_at(EMBEDDING, slice(None), float("nan")), logits="BF16"),
    Fault("empty_batch", "dense", "logits.no-positions", leave, amend=change_comparison(positions=0), logits="F32"),
)

FAULTS = (*TIED, *MOE, *TOKENIZER, *CONFIG, *LOGITS)
