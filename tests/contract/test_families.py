"""Every row of FAMILIES against transformers: the tensors of a model built from the same config, as published and as held in memory.

A new family is tested by being a row: its grid of configs is looked up by model type.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tasks.engine.families.families import FAMILIES, find_family
from tasks.engine.planning.planner import PlanRequest, make_plan
from tests.builders.catalogs import catalog_of

Shapes = dict[str, tuple[int, ...]]
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
SMALL |= {"max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
TIES = [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}]
GQA = [{"num_key_value_heads": 4}, {"num_key_value_heads": 2}]
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "moe_intermediate_size": 10}
LATENT |= {"n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
# model type → base, and lists of variations that are multiplied
GRIDS: dict[str, tuple[dict, list[list[dict]]]] = {
    "llama": (SMALL, [TIES, [*GQA, {}], [{}, {"attention_bias": True}, {"mlp_bias": True}], [{}, {"head_dim": 6}]]),
    "mistral": (SMALL, [TIES, GQA, [{}, {"head_dim": 6}, {"head_dim": None}]]),
    "qwen2": (SMALL, [TIES, GQA, [{}, {"use_sliding_window": True}]]),
    "qwen3": (SMALL, [TIES, GQA, [{}, {"attention_bias": True}], [{"head_dim": 6}, {}]]),
    "mixtral": (SMALL | {"num_experts_per_tok": 2}, [TIES, GQA, [{"num_local_experts": 3}, {"num_local_experts": 2, "head_dim": 6}]]),
    "qwen3_moe": (
        SMALL | MOE | {"num_hidden_layers": 4},
        [
            TIES,
            [{"num_key_value_heads": 2, "head_dim": 6}],
            [{}, {"attention_bias": True}],
            [{}, {"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}, {"decoder_sparse_step": 3, "mlp_only_layers": [2]}],
        ],
    ),
    "qwen2_moe": (
        SMALL | MOE | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 14},
        [
            TIES,
            GQA,
            [{}, {"qkv_bias": False}],
            [{}, {"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}],
        ],
    ),
    "deepseek_v3": (
        SMALL | LATENT | {"num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        [
            TIES,
            [{"q_lora_rank": 12}, {"q_lora_rank": None}],
            [{}, {"attention_bias": True}],
            [{}, {"first_k_dense_replace": 0, "n_shared_experts": 2}],
        ],
    ),
    "gpt2": (GPT2, [[*TIES, {}], [{}, {"n_inner": 20}, {"n_inner": None}]]),
}
VARIANTS = [
    pytest.param(model_type, {key: value for part in parts for key, value in part.items()}, id=f"{model_type}-{number}")
    for model_type, (_, lists) in GRIDS.items()
    for number, parts in enumerate(product(*lists))
]


def _config(model_type: str, changed: dict):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **(GRIDS[model_type][0] | changed))


def _live(config) -> Shapes:
    # What a trainer's state dict holds: a tied head is in it too.
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _published(config, folder: Path) -> Shapes:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    found: Shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return found


def test_every_model_type_of_every_family_has_a_grid():
    assert set(GRIDS) == {model_type for family in FAMILIES for model_type in family.model_types}


@pytest.mark.parametrize(("model_type", "changed"), VARIANTS)
def test_a_release_holds_what_transformers_publishes_from_the_same_config(model_type, changed, tmp_path):
    config = _config(model_type, changed)
    published = _published(config, tmp_path)
    written = config.to_dict()  # config.json as it is saved
    family = find_family(written)
    assert family is not None
    dims = family.dims(written)
    assert dict(family.expectation(dims).shapes) == published
    if config.tie_word_embeddings:
        assert family.head not in published
        assert dict(family.expectation(dims, keep_tied_head=True).shapes) == published | {family.head: published[family.embedding]}


@pytest.mark.parametrize(("model_type", "changed"), VARIANTS)
def test_a_live_state_dict_is_mapped_to_the_release_both_ways(model_type, changed):
    config = _config(model_type, changed)
    live = _live(config)
    family = find_family(config.to_dict())
    dims = family.dims(config.to_dict())
    expected = family.expectation(dims)
    plan = make_plan(catalog_of(live), PlanRequest(family, dims, expected))
    assert {t.name: t.shape for _, t in plan.tensors()} == dict(expected.shapes)
    consumed = {box.name for _, t in plan.tensors() for box in t.inputs} | {alias.name for alias in plan.aliases}
    assert consumed == set(live)
    assert bool(plan.aliases) == bool(config.tie_word_embeddings)


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_every_naming_makes_every_target_from_sources_of_its_own_names(family):
    model_type = family.model_types[0]
    config = _config(model_type, {"tie_word_embeddings": False, **({"num_key_value_heads": 2} if model_type != "gpt2" else {})}).to_dict()
    dims = family.dims(config)
    expected = family.expectation(dims)
    for naming, rows in [(each, rows) for each in family.namings for rows in (each.rows, each.rows[::-1])]:
        sources = _sources_of(rows, expected.shapes, dims.sizes)
        if len(sources) == 0:
            continue
        assert family.naming(sources) == naming, naming.name
        plan = make_plan(catalog_of(sources, records_shapes=False, rows=0), PlanRequest(family, dims, expected))
        assert {t.name: t.shape for _, t in plan.tensors()} == dict(expected.shapes), naming.name
        assert {box.name for _, t in plan.tensors() for box in t.inputs} == set(sources)


def _sources_of(rows, shapes: Shapes, sizes) -> Shapes:
    # Per rule, its source for every layer and expert whose targets the release holds; shapes by the op's inverse. Of two names for the same
    # targets, the one whose rule comes first.
    found: Shapes = {}
    fed: set[str] = set()
    layers, experts = range(sizes["num_layers"]), range(sizes.get("num_experts", 1))
    for row in rows:
        for layer, expert in product(layers if "{layer}" in row.source else [0], experts if "{expert}" in row.source else [0]):
            targets = [t.format(layer=layer, expert=expert) for t in getattr(row, "targets", ())]
            if targets and all(target in shapes for target in targets) and not fed.intersection(targets):
                fed |= set(targets)
                source = row.source.format(layer=layer, expert=expert)
                found[source] = row.op.source_shape([shapes[target] for target in targets], sizes)
    return found


LEAVABLE = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "n_inner", "decoder_sparse_step")
LEFT_OUT = [(model_type, key) for model_type in GRIDS for key in LEAVABLE]


@pytest.mark.parametrize(("model_type", "key"), LEFT_OUT)
def test_a_key_left_out_of_the_config_means_what_transformers_takes_it_for(model_type, key):
    from transformers import AutoConfig

    # Sizes that transformers' own defaults (128 per head, 8 or 32 KV heads) fit.
    base = {"num_attention_heads": 32, "hidden_size": 64, "n_embd": 64, "n_head": 4, "num_key_value_heads": 16, "head_dim": 4}
    written = GRIDS[model_type][0] | (base if model_type != "gpt2" else {"n_embd": 64}) | {"model_type": model_type}
    written.pop(key, None)
    if model_type == "mixtral":
        written["num_local_experts"] = 3
    config = AutoConfig.for_model(**written)
    family = find_family(written)
    dims = family.dims(written)
    live = _live(config)
    plan = make_plan(catalog_of(live), PlanRequest(family, dims, family.expectation(dims)))
    assert {box.name for _, t in plan.tensors() for box in t.inputs} | {a.name for a in plan.aliases} == set(live)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "mixtral", "qwen3_moe"])
def test_kv_heads_that_the_config_says_are_null_are_as_many_as_heads(model_type):
    written = GRIDS[model_type][0] | {"model_type": model_type, "num_key_value_heads": None}
    family = find_family(written)
    assert family.dims(written).sizes["num_kv_heads"] == 4
