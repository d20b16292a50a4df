"""Every source is consumed once, every target produced once, or the plan is refused by name."""

from dataclasses import replace

import pytest

from reports.errors import CoverageError, FormatError, RequestError, ShapeError, UnmappedError
from tasks.engine.families.llama import LLAMA
from tasks.engine.planning.choose import Choice, choose_family, expectation_for
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.tensors.rules import Naming, Rule
from tests.builders.catalogs import LLAMA_CONFIG, LLAMA_SHAPES, catalog_of, request_of

UNTIED = request_of(LLAMA, LLAMA_CONFIG)
TIED_CONFIG = LLAMA_CONFIG | {"tie_word_embeddings": True}
HEADLESS = {name: shape for name, shape in LLAMA_SHAPES.items() if name != "lm_head.weight"}


def _names(plan) -> list[str]:
    return [tensor.name for _, tensor in plan.tensors()]


def test_a_whole_checkpoint_gives_every_target_and_no_leftover():
    plan = make_plan(catalog_of(LLAMA_SHAPES), UNTIED)
    assert sorted(_names(plan)) == sorted(LLAMA_SHAPES)
    assert (plan.aliases, plan.dropped) == ((), ())


def test_missing_and_phantom_names_are_reported_together():
    shapes = {n: s for n, s in LLAMA_SHAPES.items() if "o_proj" not in n} | {"model.extra": (3,), "lora.A": (2,)}
    with pytest.raises(UnmappedError) as refusal:
        make_plan(catalog_of(shapes), UNTIED)
    assert refusal.value.phantom == ("model.extra", "lora.A")
    assert refusal.value.missing == ("model.layers.0.self_attn.o_proj.weight",)
    for word in ("model.extra", "lora.A", "o_proj", "--drop", "llama"):
        assert word in str(refusal.value)


def test_a_quantized_source_is_called_that():
    shapes = LLAMA_SHAPES | {"model.layers.0.mlp.up_proj.weight_scale": (16, 1)}
    with pytest.raises(UnmappedError, match=r"is quantized: it holds model\.layers\.0\.mlp\.up_proj\.weight_scale.* unquantized weights"):
        make_plan(catalog_of(shapes), UNTIED)


def test_a_layer_the_config_does_not_have_is_phantom():
    with pytest.raises(UnmappedError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        make_plan(catalog_of(LLAMA_SHAPES | {"model.layers.1.input_layernorm.weight": (8,)}), UNTIED)


@pytest.mark.parametrize("name", ["model.layers.00.input_layernorm.weight", "model.layers.#.input_layernorm.weight"])
def test_a_layer_that_is_no_plain_number_is_phantom(name):
    with pytest.raises(UnmappedError):
        make_plan(catalog_of(LLAMA_SHAPES | {name: (8,)}), UNTIED)


def test_two_sources_of_one_target_are_refused_and_dropping_one_keeps_the_other():
    rows = (*LLAMA.namings[0].rows, Rule("old.norm.weight", ("model.norm.weight",)))
    request = request_of(replace(LLAMA, namings=(Naming("both", rows),)), LLAMA_CONFIG)
    catalog = catalog_of(LLAMA_SHAPES | {"old.norm.weight": (8,)})
    with pytest.raises(UnmappedError, match=r"model\.norm\.weight: fed twice, by model\.norm\.weight and old\.norm\.weight"):
        make_plan(catalog, request)
    plan = make_plan(catalog, replace(request, drops=(("old.*", "an old copy"),)))
    assert sorted(_names(plan)) == sorted(LLAMA_SHAPES)
    assert [(d.name, d.because, d.asked_by, d.targets) for d in plan.dropped] == [("old.norm.weight", "an old copy", "request", ())]


def test_a_shape_the_config_does_not_imply_is_refused_naming_both():
    with pytest.raises(ShapeError) as refusal:
        make_plan(catalog_of(LLAMA_SHAPES | {"model.norm.weight": (9,), "lm_head.weight": (11, 8)}), UNTIED)
    for word in ("model.norm.weight", "(9,)", "(8,)", "lm_head.weight", "config.json"):
        assert word in str(refusal.value)


def test_every_tensor_with_a_hole_is_counted_and_the_first_is_spelled_out():
    catalog = catalog_of(LLAMA_SHAPES, rows=2)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        tensor = catalog.tensors[name]
        catalog.tensors[name] = replace(tensor, shape=(tensor.shape[0] + 2, *tensor.shape[1:]))
    with pytest.raises(CoverageError, match=r"rows 10-11 of \(12, 8\) are in no shard\. So are parts of model\.norm\.weight"):
        make_plan(catalog, UNTIED)


def test_shapes_a_format_does_not_record_come_from_the_config_and_coverage_is_proven_on_them():
    plan = make_plan(catalog_of(LLAMA_SHAPES, records_shapes=False), UNTIED)
    assert {t.name: t.shape for _, t in plan.tensors()} == LLAMA_SHAPES
    short = LLAMA_SHAPES | {"lm_head.weight": (9, 8)}
    with pytest.raises(CoverageError, match=r"lm_head\.weight: rows 9-9 of \(10, 8\) are in no shard"):
        make_plan(catalog_of(short, records_shapes=False), UNTIED)


def test_without_shapes_and_without_a_config_there_is_no_plan():
    with pytest.raises(FormatError, match="--assets"):
        make_plan(catalog_of(LLAMA_SHAPES, records_shapes=False), PlanRequest())


def test_a_drop_that_matches_nothing_is_refused():
    with pytest.raises(RequestError, match=r"--drop 'lm_haed\.\*' matches no source tensor"):
        make_plan(catalog_of(LLAMA_SHAPES), replace(UNTIED, drops=(("lm_haed.*", "a typo"),)))


def test_a_drop_names_what_the_release_lacks_and_the_expectation_gives_it_up():
    plan = make_plan(catalog_of(LLAMA_SHAPES), replace(UNTIED, drops=(("*.mlp.*", "no MLP"),)))
    targets = {target for drop in plan.dropped for target in drop.targets}
    assert targets == {name for name in LLAMA_SHAPES if ".mlp." in name}
    assert set(_names(plan)) == LLAMA_SHAPES.keys() - targets
    expected = expectation_for(plan, Choice(UNTIED.family, UNTIED.dims, UNTIED.expected))
    assert set(expected.shapes) == set(_names(plan))


def test_a_buffer_is_dropped_by_rule_with_its_reason_even_when_its_shape_is_odd():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plan = make_plan(catalog_of(LLAMA_SHAPES | {name: (2,)}), UNTIED)
    assert [(d.name, d.asked_by) for d in plan.dropped] == [(name, "rule")]
    assert "recomputed" in plan.dropped[0].because


@pytest.mark.parametrize("shapes", [LLAMA_SHAPES, HEADLESS], ids=["with head", "without head"])
@pytest.mark.parametrize("keep", [False, True], ids=["left out", "kept"])
def test_a_tied_head_is_left_out_or_written_whether_the_source_has_it_or_not(shapes, keep):
    plan = make_plan(catalog_of(shapes), request_of(LLAMA, TIED_CONFIG, keep_tied_head=keep))
    assert set(_names(plan)) == set(LLAMA_SHAPES if keep else HEADLESS)
    heads = [t for _, t in plan.tensors() if t.name == "lm_head.weight"]
    assert [t.inputs[0].name for t in heads] == (["lm_head.weight" if "lm_head.weight" in shapes else "model.embed_tokens.weight"] * keep)
    assert [(a.name, a.of) for a in plan.aliases] == (
        [("lm_head.weight", "model.embed_tokens.weight")] if "lm_head.weight" in shapes and not keep else []
    )


def test_an_untied_config_without_a_head_is_refused():
    with pytest.raises(UnmappedError) as refusal:
        make_plan(catalog_of(HEADLESS), UNTIED)
    assert refusal.value.missing == ("lm_head.weight",)


def test_a_tied_head_with_more_rows_than_the_embedding_is_refused():
    with pytest.raises(ShapeError, match=r"lm_head\.weight: has shape \(12, 8\), model\.embed_tokens\.weight \(10, 8\)"):
        make_plan(catalog_of(LLAMA_SHAPES | {"lm_head.weight": (12, 8)}), request_of(LLAMA, TIED_CONFIG))


def test_dropping_the_embedding_of_a_tied_head_alone_is_refused():
    request = request_of(LLAMA, TIED_CONFIG, drops=(("model.embed_tokens.weight", "vocabulary to be swapped"),))
    with pytest.raises(RequestError, match=r"lm_head\.weight: .* Drop both or neither"):
        make_plan(catalog_of(LLAMA_SHAPES), request)
    both = replace(request, drops=(*request.drops, ("lm_head.weight", "vocabulary to be swapped")))
    assert "model.embed_tokens.weight" not in _names(make_plan(catalog_of(LLAMA_SHAPES), both))


def _never(config: object) -> None:
    raise AssertionError(config)


@pytest.mark.parametrize(
    ("name", "config", "word"),
    [("lama", LLAMA_CONFIG, "no family"), ("auto", {}, "--assets"), ("gpt2", LLAMA_CONFIG, "--family auto")],
)
def test_a_family_that_does_not_fit_the_config_is_refused(name, config, word):
    with pytest.raises(RequestError, match=word):
        choose_family(name, config, keep_tied_head=False, describe=_never)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "8"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", 8.0),
        ("hidden_size", 9),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", 3),
        ("vocab_size", [10]),
    ],
)
def test_a_size_that_makes_no_sense_is_refused_naming_the_config(key, value):
    with pytest.raises(RequestError, match=r"config\.json"):
        LLAMA.dims(LLAMA_CONFIG | {key: value})
