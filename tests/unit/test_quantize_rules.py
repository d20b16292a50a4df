"""Which weights are quantized how: rules in their order, the family's ignore list, reasons, and what the config is told."""

import re

import pytest

from flows.quantize_rules import read_rules
from reports.errors import RequestError
from tasks.engine.families.families import FAMILIES
from tasks.engine.families.gpt2 import GPT2
from tasks.engine.families.llama import LLAMA
from tasks.engine.families.moe import QWEN2_MOE
from tasks.engine.planning.plan import Input, TensorPlan
from tasks.engine.planning.quantize import QuantizeRule, check_quantizable, in_words, plan_parts, split_fusions
from tasks.engine.tensors.ops import OpCall

ROLES = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")


def _target(name: str, shape: tuple[int, ...] = (128, 128), dtype: str = "BF16") -> TensorPlan:
    return TensorPlan(name, shape, dtype, (Input(name, (0,) * len(shape), shape, dtype, shape),), OpCall(), "copy")


def _model(layers: int = 2) -> list[TensorPlan]:
    inside = [_target(f"model.layers.{i}.{role}.weight") for i in range(layers) for role in ROLES]
    norms = [_target(f"model.layers.{i}.input_layernorm.weight", (128,)) for i in range(layers)]
    return [_target("model.embed_tokens.weight"), *inside, *norms, _target("lm_head.weight")]


def _plan(*rules: tuple[str, str], family=LLAMA, model=None):
    return plan_parts(model or _model(), [QuantizeRule(p, e, "asked" if not e else "") for p, e in rules], family)


def test_one_encoding_is_said_of_the_class_and_the_head_is_ignored():
    parts, said = _plan(("*", "int8"))
    assert [(g.encoding, g.targets) for g in said.groups] == [("int8", ("Linear",))]
    assert (said.ignore, said.whole) == (("lm_head",), ())
    stored = [t.name for t in parts]
    assert "model.embed_tokens.weight" in stored
    assert "lm_head.weight" in stored
    assert [n for n in stored if n.startswith("model.layers.1.mlp.up_proj")] == [
        f"model.layers.1.mlp.up_proj.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_shape")
    ]


def test_the_first_rule_that_matches_counts_and_groups_are_told_apart_by_name():
    _, said = _plan(("model.layers.0.*", ""), ("*.down_proj.weight", "fp8"), ("*", "int4"))
    assert [(g.encoding, g.targets) for g in said.groups] == [
        ("int4", ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj")),
        ("fp8", ("model.layers.1.mlp.down_proj",)),
    ]
    assert said.ignore == ("lm_head", *(f"model.layers.0.{role}" for role in ROLES))
    assert {whole.because for whole in said.whole} == {"asked"}


def test_a_role_that_is_of_one_encoding_throughout_is_one_pattern():
    _, said = _plan(("*.down_proj.weight", "fp8"), ("*", "int4"))
    patterns = [target.removeprefix("re:") for group in said.groups if group.encoding == "fp8" for target in group.targets]
    assert len(patterns) == 1
    assert re.match(patterns[0], "model.layers.17.mlp.down_proj")
    assert not re.match(patterns[0], "model.layers.17.mlp.up_proj")
    assert not re.match(patterns[0], "modelxlayers.17.mlp.down_proj")


def test_a_weight_that_cannot_be_held_is_ignored_by_name_and_told_in_words():
    model = [
        *_model(),
        _target("model.layers.0.mlp.gate_proj.weight", (128, 96)),
        _target("model.layers.1.mlp.gate_proj.weight", (128, 96)),
    ]
    _, said = _plan(("*", "int4"), model=model)
    assert said.ignore == ("lm_head", r"re:^model\.layers\.\d+\.mlp\.gate_proj$")
    reason = "int4 needs columns in multiples of 128, this has 96"
    assert [(w.name, w.because) for w in said.whole] == [(f"model.layers.{i}.mlp.gate_proj.weight", reason) for i in (0, 1)]
    assert in_words(said) == (f"model.layers.*.mlp.gate_proj.weight (2) is not quantized: {reason}",)


def test_patterns_of_the_ignore_list_that_match_nothing_are_left_out():
    router = _target("model.layers.0.mlp.gate.weight", (4, 128))
    assert _plan(("*", "fp8"), family=QWEN2_MOE, model=[*_model(), router])[1].ignore == ("lm_head", r"re:.*\.mlp\.gate$")
    assert _plan(("*", "fp8"), family=QWEN2_MOE)[1].ignore == ("lm_head",)


def test_routers_of_every_family_with_experts_are_ignored():
    for family in FAMILIES:
        if family.experts is not None:
            module = family.experts.router.format(layer=3).removesuffix(".weight")
            assert any(re.match(p.removeprefix("re:"), module) for p in family.ignore if p.startswith("re:")), family.name


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        (("*.gate_up_proj.weight", "int8"), "matches no tensor"),
        (("lm_head*", "int8"), "means lm_head.weight, which family llama never quantizes"),
    ],
)
def test_a_rule_without_effect_is_refused(rule, word):
    with pytest.raises(RequestError, match=re.escape(word)):
        _plan(rule, ("*", "fp8"))


@pytest.mark.parametrize(("family", "word"), [(None, "needs a family"), (GPT2, "Conv1D")])
def test_a_model_without_known_linear_layers_is_refused(family, word):
    with pytest.raises(RequestError, match=word):
        check_quantizable(family)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rules: []", "rules: List should have at least 1 item"),
        ("rules:\n  - {pattern: '*', encoding: int3}", r"rules\.0\.encoding"),
        ("rules:\n  - {pattern: '*'}", r"rules\.0\.encoding: Field required"),
        ("rules:\n  - {pattern: '*', encoding: fp8, why: x}", r"rules\.0\.why"),
        ("[1, 2", "is not YAML"),
        ("", "at the top"),
    ],
)
def test_a_file_of_rules_that_makes_no_sense_is_refused_by_its_place(text, word, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(RequestError, match=word):
        read_rules(str(path))


def test_rules_are_read_in_their_order(tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text("rules:\n- {pattern: 'a*', encoding: whole, because: it is small}\n- {pattern: '*', encoding: int8-w8a8}\n")
    assert read_rules(str(path)) == (("a*", "", "it is small"), ("*", "int8-w8a8", ""))
    assert (read_rules(""), read_rules("fp8")) == ((), (("*", "fp8", ""),))


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        ([("*", "fp8"), ("*.down_proj.weight", "int4")], "decides nothing"),
        ([("*", "fp8"), ("model.layers.0.*", "")], "decides nothing"),
        ([("*.q_proj.weight", "fp8"), ("*.self_attn.*", "fp8"), ("*", "int4")], "decides nothing"),
        ([("*norm*", "int8"), ("*", "fp8")], "matches no weight of a linear layer"),
        ([("model.embed_tokens.weight", "int8"), ("*", "fp8")], "matches no weight of a linear layer"),
    ],
)
def test_a_rule_that_decides_nothing_is_refused(rules, word):
    with pytest.raises(RequestError, match=word):
        _plan(*rules)


@pytest.mark.parametrize(
    "rules",
    [
        [("*.self_attn.*", "fp8"), ("*.mlp.*", "int8"), ("*", "int4")],  # the rest, of which there is none here
        [("lm_head.weight", ""), ("*", "fp8")],
        [("model.layers.0.*", ""), ("*.down_proj.weight", "int8"), ("*", "int4")],
    ],
)
def test_a_rule_for_the_rest_and_one_that_says_what_holds_anyway_are_not(rules):
    _plan(*rules)


GQA = [
    *(_target(f"model.layers.{i}.self_attn.{name}_proj.weight", (rows, 128)) for i in range(3) for name, rows in (("q", 256), ("k", 64))),
    *(_target(f"model.layers.{i}.mlp.{name}_proj.weight") for i in range(3) for name in ("gate", "up", "down")),
]


def _split(*rules: tuple[str, str]) -> tuple[str, ...]:
    return split_fusions(*_plan(*rules, model=GQA))


def test_layers_that_vllm_fuses_and_that_are_stored_in_two_ways_are_named():
    (keys,) = _split(("*", "fp8-block"))  # 64 rows are no whole block
    assert keys.endswith("model.layers.*.self_attn: q_proj fp8-block, k_proj whole (3)")
    (gates,) = _split(("model.layers.1.mlp.up_proj.weight", "int8"), ("*", "int4"))
    assert gates.endswith("model.layers.*.mlp: gate_proj int4, up_proj int8")


def test_layers_of_one_encoding_each_and_down_projections_of_another_are_not():
    assert _split(("*.down_proj.weight", "int8"), ("*", "int4")) == ()
    assert _split(("model.layers.0.*", ""), ("*.self_attn.*", "fp8"), ("*", "int4")) == ()


def test_what_stays_whole_is_named_by_role_and_a_single_weight_by_its_name():
    _, said = _plan(("model.layers.1.self_attn.*", ""), ("*.down_proj.weight", ""), ("*", "int4"))
    assert in_words(said) == (
        "model.layers.*.mlp.down_proj.weight (2) is not quantized: asked",
        "model.layers.1.self_attn.q_proj.weight is not quantized: asked",
    )
