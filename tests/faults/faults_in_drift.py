"""Planted faults that a release shows only beside a reference: the trainer's config and tokenizer, or an earlier release."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.builders.editing import Tensors, edit_json, set_fields
from tests.faults.faults_in_structure import config, generation, set_rope, tokenizer
from tests.faults.faults_in_weights import DOWN, EMBEDDING, UP, leave, tensors
from tests.faults.planting import Fault

TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def exchange_ids(folder: Path) -> None:
    """Let two words change their ids."""
    edit_json(folder / "tokenizer.json", lambda value: value["model"]["vocab"].update({"w50": 51, "w51": 50}))


def forget_word(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", lambda value: value["model"]["vocab"].pop("w299"))


def add_word(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", lambda value: value["model"]["vocab"].update({"w300": 300}))


def split_otherwise(folder: Path) -> None:
    """Let the tokenizer cut texts at spaces only."""
    set_fields(folder / "tokenizer.json", pre_tokenizer={"type": "WhitespaceSplit"})


def add_bos(folder: Path) -> None:
    """Let the tokenizer begin every text with its BOS."""
    sequence = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    processor = {"type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special}
    set_fields(folder / "tokenizer.json", post_processor=processor)


def rewrite_template(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Return a planter that changes the chat template."""

    def plant(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        path.write_text(change(path.read_text()))

    return plant


def train(held: Tensors) -> None:
    """Move every weight a little, as training does."""
    generator = torch.Generator().manual_seed(3)
    held.update({name: t + 0.02 * t.std() * torch.randn(t.shape, generator=generator) for name, t in held.items() if t.ndim > 1})


def trained_but(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    """Return a planter that trains the weights and then damages them."""

    def plant(held: Tensors) -> None:
        train(held)
        change(held)

    return tensors(plant)


def scale(part: str, factor: float) -> Callable[[Tensors], None]:
    return lambda held: held.update({name: t * factor for name, t in held.items() if part in name})


def set_section(**sections: object) -> Callable[[Path], None]:
    """Return a planter that sets parts of tokenizer.json."""
    return lambda folder: set_fields(folder / "tokenizer.json", **sections)


def make_ordinary(folder: Path) -> None:
    """Let the token that ends a turn be one that users see."""
    edit_json(folder / "tokenizer.json", lambda value: [t.update(special=False) for t in value["added_tokens"] if "im_end" in t["content"]])


def lose_tokenizer(folder: Path) -> None:
    for path in [*folder.glob("tokenizer*"), *folder.glob("special_tokens_map.json")]:
        path.unlink()


CONFIG = (
    Fault("config_lost_beside_a_reference", "dense", "config_drift.absent", lambda folder: (folder / "config.json").unlink()),
    Fault("architecture_of_a_sister_model", "tied", "config_drift.architecture", config(architectures=["Qwen2Model"])),
    Fault("fewer_shared_experts", "router_bias", "config_drift.dims", config(n_shared_experts=2)),
    Fault("head_dim_lost", "router_bias", "config_drift.dims", config(v_head_dim=16)),
    Fault("rope_theta_of_another_era", "dense", "config_drift.rope", set_rope(rope_theta=500000.0)),  # 63
    Fault("rope_scaled_as_no_reference_says", "dense", "config_drift.rope", set_rope(**YARN)),  # 64
    Fault("rope_scaling_lost", "dense", "config_drift.rope", set_rope(rope_type="default", factor=None), prepare=set_rope(**YARN)),
    Fault("eps_of_another_model", "dense", "config_drift.eps", config(rms_norm_eps=1e-5)),
    Fault("positions_doubled", "dense", "config_drift.positions", config(max_position_embeddings=256)),  # 63
    Fault("sliding_window_added", "tied", "config_drift.positions", config(sliding_window=64, use_sliding_window=True)),
    Fault("one_expert_per_token", "moe", "config_drift.routing", config(num_experts_per_tok=1)),
    Fault("router_weights_not_normalized", "moe", "config_drift.routing", config(norm_topk_prob=False)),
    Fault("normalization_of_router_lost", "moe", "config_drift.routing", config(norm_topk_prob=None)),
    Fault("router_scale_lost", "router_bias", "config_drift.routing", config(routed_scaling_factor=1.0)),
    Fault("activation_of_another_model", "dense", "config_drift.forward", config(hidden_act="gelu")),
    Fault("bos_of_another_model", "dense", "config_drift.special-ids", config(bos_token_id=4)),
    Fault("eos_of_another_model", "dense", "config_drift.special-ids", config(eos_token_id=[2, 5])),
    Fault("padding_of_another_model", "dense", "config_drift.padding", config(pad_token_id=2)),
    Fault("chat_end_lost", "dense", "config_drift.stop-ids", generation(eos_token_id=2), prepare=generation(eos_token_id=[2, 5])),
    Fault("sampling_changed", "dense", "config_drift.generation", generation(temperature=0.2)),
    Fault("generation_config_lost", "dense", "config_drift.generation", lambda folder: (folder / "generation_config.json").unlink()),
    Fault("unknown_field_changed", "dense", "config_drift.field", config(own_field=2), prepare=config(own_field=1)),
)
TOKENIZER = (
    Fault("ids_of_two_words_exchanged", "dense", "tokenizer_drift.ids", exchange_ids),
    Fault("word_forgotten", "dense", "tokenizer_drift.lost", forget_word),
    Fault("word_added", "dense", "tokenizer_drift.added", add_word),
    Fault("eos_token_of_another_model", "dense", "tokenizer_drift.special", tokenizer(eos_token="<|im_end|>")),  # 65
    Fault("padding_token_changed", "dense", "tokenizer_drift.padding", tokenizer(pad_token="</s>")),
    Fault("texts_cut_otherwise", "dense", "tokenizer_drift.encoding", split_otherwise),
    Fault("texts_begin_with_bos", "dense", "tokenizer_drift.encoding", add_bos),
    Fault(
        "chat_without_end_token", "dense", "tokenizer_drift.chat-template", rewrite_template(lambda t: t.replace("<|im_end|>", ""))
    ),  # 66
    Fault("chat_with_spaces", "moe", "tokenizer_drift.chat-template", rewrite_template(lambda t: t.replace("{% endfor", " {% endfor"))),
    Fault("chat_template_left_out", "dense", "tokenizer_drift.chat-template", lambda folder: (folder / "chat_template.jinja").unlink()),
    Fault("tokenizer_lost", "dense", "tokenizer_drift.absent", lose_tokenizer),
    Fault("turn_end_shown_to_users", "dense", "tokenizer_drift.decoding", make_ordinary),
    Fault("texts_cut_short", "dense", "tokenizer_drift.setting", set_section(truncation=TRUNCATION)),
    Fault(
        "padding_other_side", "dense", "tokenizer_drift.setting", tokenizer(padding_side="left"), prepare=tokenizer(padding_side="right")
    ),
    Fault(
        "tokenizer_of_reference_damaged",
        "dense",
        "tokenizer_drift.unreadable",
        lambda folder: (folder / "tokenizer.json").write_text("{"),
    ),
)
WEIGHTS = (
    Fault("tensor_of_earlier_release_lost", "dense", "weights_drift.lost", trained_but(lambda held: held.pop(DOWN)), retrained=True),
    Fault(
        "tensor_added_since", "dense", "weights_drift.added", trained_but(lambda held: held.update(extra=torch.ones(2, 2))), retrained=True
    ),
    Fault(
        "matrix_transposed_since", "dense", "weights_drift.shape", trained_but(lambda held: held.update({UP: held[UP].T})), retrained=True
    ),
    Fault(
        "vocabulary_grown_since",
        "dense",
        "weights_drift.vocabulary",
        trained_but(lambda held: held.update({EMBEDDING: torch.cat([held[EMBEDDING], held[EMBEDDING][:4]])})),
        retrained=True,
    ),
    Fault("matrix_scale_lost", "dense", "weights_drift.rms", trained_but(scale(UP, 16.0)), retrained=True),
    Fault("matrix_emptied_since", "dense", "weights_drift.rms", trained_but(scale(DOWN, 0.0)), retrained=True),
    Fault("role_scaled", "dense", "weights_drift.rms-of-role", trained_but(scale(".up_proj.", 8.0)), retrained=True),
    Fault("nothing_trained", "dense", "weights_drift.unchanged", leave, retrained=True),
)
FAULTS: tuple[Fault, ...] = (*CONFIG, *TOKENIZER, *WEIGHTS)
