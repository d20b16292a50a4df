"""Which dtype a target is written in, and where in which file."""

from dataclasses import replace

import pytest

from reports.errors import EncodingError
from tasks.engine.families.llama import LLAMA
from tasks.engine.planning.encode import DtypePolicy, plan_encodings
from tasks.engine.planning.plan import Input, plan_from_json, plan_to_json
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.planning.renames import Draft
from tasks.engine.tensors.ops import OpCall
from tests.builders.catalogs import LLAMA_CONFIG, LLAMA_SHAPES, catalog_of, request_of

MIXED = {"a.u8": "U8", "b.f64": "F64", "c.bf16": "BF16", "d.f32": "F32", "e.i64": "I64", "f.bool": "BOOL"}


def _dtypes(plan) -> dict[str, tuple[str, str]]:
    return {t.name: (t.dtype, t.encoding) for _, t in plan.tensors()}


def test_floats_are_cast_and_everything_else_is_copied():
    plan = make_plan(catalog_of(dict.fromkeys(MIXED, (3,)), MIXED), PlanRequest(dtype="BF16"))
    assert _dtypes(plan) == {
        "a.u8": ("U8", "copy"),
        "b.f64": ("BF16", "cast"),
        "c.bf16": ("BF16", "copy"),
        "d.f32": ("BF16", "cast"),
        "e.i64": ("I64", "copy"),
        "f.bool": ("BOOL", "copy"),
    }


def test_fp8_is_copied_as_it_is_and_never_cast():
    catalog = catalog_of({"w": (4,)}, {"w": "F8_E4M3"})
    assert _dtypes(make_plan(catalog, PlanRequest())) == {"w": ("F8_E4M3", "copy")}
    with pytest.raises(EncodingError, match=r"^w: .* scales\. Use --dtype source"):
        make_plan(catalog, PlanRequest(dtype="BF16"))


def test_what_a_family_keeps_is_left_alone_and_listed():
    family = replace(LLAMA, keep_fp32=("model.norm.*",))
    plan = make_plan(catalog_of(LLAMA_SHAPES), request_of(family, LLAMA_CONFIG, dtype="BF16"))
    assert plan.kept_dtype == ("model.norm.weight",)
    assert {name for name, dtype in _dtypes(plan).items() if dtype == ("F32", "copy")} == {"model.norm.weight"}
    assert make_plan(catalog_of(LLAMA_SHAPES), request_of(family, LLAMA_CONFIG)).kept_dtype == ()


def test_inputs_of_different_dtypes_do_not_become_one_target():
    boxes = tuple(Input(name, (0,), (2,), dtype, (2,)) for name, dtype in (("a", "F32"), ("b", "BF16")))
    with pytest.raises(EncodingError, match="is fed by tensors of dtypes"):
        plan_encodings([Draft("w", (4,), boxes, OpCall())], DtypePolicy())


@pytest.mark.parametrize("max_file_bytes", [1, 40, 1000])
def test_tensors_lie_back_to_back_at_their_alignment_and_empty_ones_have_a_place(max_file_bytes):
    sizes = {"U8": 1, "F64": 8, "BF16": 2, "F32": 4, "I64": 8, "BOOL": 1}
    shapes = dict.fromkeys(MIXED, (3,)) | {"empty": (0, 4), "scalar": ()}
    plan = make_plan(catalog_of(shapes, MIXED | {"empty": "F32", "scalar": "F32"}), PlanRequest(max_file_bytes=max_file_bytes))
    assert sorted(_dtypes(plan)) == sorted(shapes)
    for file in plan.files:
        assert file.header_nbytes % 8 == 0
        at = file.header_nbytes
        for tensor in file.tensors:
            assert tensor.span == (at, at + tensor.spec.nbytes)
            assert at % sizes[tensor.dtype] == 0 or tensor.spec.nbytes == 0
            at = tensor.span[1]
        assert file.nbytes == at


def test_a_plan_survives_json_and_its_digest_covers_all_but_the_place_of_the_source():
    plan = make_plan(catalog_of(LLAMA_SHAPES, rows=3), request_of(LLAMA, LLAMA_CONFIG, dtype="BF16", max_file_bytes=200))
    assert plan_from_json(plan_to_json(plan)) == plan
    moved = make_plan(
        replace(catalog_of(LLAMA_SHAPES, rows=3), root="/elsewhere"), request_of(LLAMA, LLAMA_CONFIG, dtype="BF16", max_file_bytes=200)
    )
    assert (moved.digest, moved.source.root) == (plan.digest, "/elsewhere")
    others = [
        request_of(LLAMA, LLAMA_CONFIG, dtype="F16", max_file_bytes=200),
        request_of(LLAMA, LLAMA_CONFIG, dtype="BF16", max_file_bytes=201_000),
        request_of(LLAMA, LLAMA_CONFIG, dtype="BF16", max_file_bytes=200, drops=(("lm_head.*", "x"),)),
        request_of(LLAMA, LLAMA_CONFIG, dtype="BF16", max_file_bytes=200, drops=(("lm_head.*", "y"),)),
    ]
    digests = {make_plan(catalog_of(LLAMA_SHAPES, rows=3), request).digest for request in others}
    assert len(digests | {plan.digest}) == 5


@pytest.mark.parametrize(
    ("old", "new"), [('"cast"', '"copy"'), ('"F32"', '"F16"'), ("shardwright.plan/1", "shardwright.plan/2"), ("lm_head", "lm_haed")]
)
def test_an_edited_plan_is_refused(old, new):
    text = plan_to_json(make_plan(catalog_of(LLAMA_SHAPES), request_of(LLAMA, LLAMA_CONFIG, dtype="BF16")))
    assert old in text
    with pytest.raises(ValueError, match="plan"):
        plan_from_json(text.replace(old, new, 1))
