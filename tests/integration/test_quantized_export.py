"""Quantized releases through the whole line: they load with transformers as they are, and a wrong one is not published."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from flows.export import NotPublishedError, run_export
from flows.requests import ExportRequest
from flows.run import Outcome, PlainRunner, Silent
from reports.errors import RequestError
from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.writing import quantize
from tests.builders.quantizable import MODELS, build_quantizable
from tests.builders.released import GOLDEN

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow

CASE = GOLDEN / "accelerate_llama"
NO_LOGITS = ["logits=not of interest here"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("sources")
    return {name: build_quantizable(name, base / name) for name in MODELS}


def _export(source: Path, base: Path, encoding: str, **options: object) -> Outcome:
    request = {"source": source, "to": base / "release", "quantize": encoding, "runs": base / "runs", "fsync": False, **options}
    return run_export(ExportRequest.model_validate(request), PlainRunner(), Silent())


def _load(folder: Path) -> torch.nn.Module:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert not said["mismatched_keys"]
    return model


def _config(base: Path) -> dict:
    return json.loads((base / "release/config.json").read_text())


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_release_is_published_within_its_limits_and_loads_as_it_is(name, encoding, sources, tmp_path):
    if name == "moe" and encoding in ("int8-w8a8", "fp8-block"):
        with pytest.raises(RequestError, match=f"does not load experts stored as {encoding}"):
            _export(sources[name], tmp_path, encoding)
        assert _export(sources[name], tmp_path, encoding, skip=NO_LOGITS).verdict.green
        return
    outcome = _export(sources[name], tmp_path, encoding)
    assert outcome.verdict.green
    assert outcome.report.notes == ()
    (cast,) = [comparison for comparison in outcome.report.logits if comparison.name == "cast"]
    assert cast.limits_row == {"fp8": "FP8", "int8": "INT8", "int4": "INT4"}[encoding.split("-")[0]] + (" MoE" if name == "moe" else "")
    assert 0 < cast.metrics["mean_kl"] <= 3 * cast.metrics["noise_floor"]
    quantized = next(result for result in outcome.report.results if result.check == "quantized")
    assert quantized.measured["largest_relative_error"] < {"fp8": 0.04, "int8": 0.015, "int4": 0.12}[encoding.split("-")[0]]
    ids = torch.arange(6, 60)[None]
    model = _load(tmp_path / "release")
    reference = _load(sources[name])
    with torch.inference_mode():
        found, wanted = (m(input_ids=ids).logits.log_softmax(-1) for m in (model, reference))
    assert float((wanted.exp() * (wanted - found)).sum(-1).mean()) <= cast.limits["mean_kl"] * 4  # other ids than the line's


WHOLE_EXPERTS = "rules:\n- {pattern: '*.experts.*', encoding: whole}\n- {pattern: '*', encoding: %s}\n"


@pytest.mark.parametrize(
    ("rules", "loads"),
    [
        ("rules:\n- {pattern: '*.experts.*', encoding: int4}\n- {pattern: '*', encoding: fp8}\n", True),
        ("rules:\n- {pattern: '*.experts.*', encoding: fp8}\n- {pattern: '*', encoding: int8-w8a8}\n", True),
        ("rules:\n- {pattern: '*.experts.*.down_proj.weight', encoding: int8}\n- {pattern: '*', encoding: int4}\n", False),
        (WHOLE_EXPERTS % "fp8", True),
        (WHOLE_EXPERTS % "int4", False),
        (WHOLE_EXPERTS.replace("*.experts.*", "model.layers.0.*") % "int4", False),
    ],
)
def test_mixture_of_encodings_in_bf16_is_published_where_transformers_loads_it_and_refused_where_not(rules, loads, tmp_path):
    source = build_quantizable("moe", tmp_path / "source", dtype=torch.bfloat16)
    asked = tmp_path / "rules.yaml"
    asked.write_text(rules)
    if not loads:
        with pytest.raises(RequestError, match="transformers does not load experts"):
            _export(source, tmp_path, str(asked))
        assert _export(source, tmp_path, str(asked), skip=NO_LOGITS).verdict.green
        return
    assert _export(source, tmp_path, str(asked)).verdict.green
    _load(tmp_path / "release")


@pytest.mark.parametrize("encoding", ["int4", "int8"])
def test_packed_experts_of_a_bf16_model_run_as_others_do(encoding, tmp_path):
    source = build_quantizable("moe", tmp_path / "source", dtype=torch.bfloat16)
    (cast,) = _export(source, tmp_path, encoding).report.logits
    assert 0 < cast.metrics["mean_kl"] <= cast.limits["mean_kl"]


def test_config_declares_what_compressed_tensors_declares(sources, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig

    _export(sources["moe"], tmp_path, "int4", skip=NO_LOGITS)
    said = _config(tmp_path)["quantization_config"]
    parsed = QuantizationConfig.model_validate({key: said[key] for key in said if key in QuantizationConfig.model_fields})
    assert parsed.model_dump(mode="json") == {key: said[key] for key in QuantizationConfig.model_fields}
    assert said["ignore"] == ["lm_head", r"re:.*\.mlp\.gate$"]
    assert said["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert (said["format"], said["quantization_status"]) == ("pack-quantized", "compressed")


def test_sharded_checkpoint_in_bf16_with_its_recorded_logits(tmp_path):
    outcome = _export(CASE / "ckpt", tmp_path, "fp8", assets=CASE / "hf", dtype="bf16", golden=CASE / "ref/golden.safetensors")
    assert outcome.verdict.green
    assert [comparison.name for comparison in outcome.report.logits] == ["mapping", "mapping", "cast"]
    assert _config(tmp_path)["dtype"] == "bfloat16"
    assert {p.dtype for p in _load(tmp_path / "release").parameters() if p.is_floating_point()} <= {torch.bfloat16, torch.float8_e4m3fn}


def test_weights_that_no_encoding_holds_stay_whole_and_are_named_with_the_reason(tmp_path):
    outcome = _export(CASE / "ckpt", tmp_path, "int4", assets=CASE / "hf")
    assert outcome.verdict.green
    assert outcome.report.notes[0] == "no weight could be quantized: this release is not quantized"
    assert any("q_proj.weight (2) is not quantized: int4 needs columns in multiples of 128, this has 64" in n for n in outcome.report.notes)
    assert "quantization_config" not in _config(tmp_path)
    _load(tmp_path / "release")


def _doubled(name: str, values: torch.Tensor, encoding: object):
    stored, scales = ENCODE(name, values, encoding)
    return stored, scales * 2


def _shifted(name: str, values: torch.Tensor, encoding: object):
    stored, scales = ENCODE(name, values, encoding)
    return stored, scales.roll(scales.shape[0] // 2, 0)


def _nan(name: str, values: torch.Tensor, encoding: object):
    stored, scales = ENCODE(name, values, encoding)
    scales[0, 0] = float("nan")
    return stored, scales


def _nibbles(name: str, values: torch.Tensor, encoding: object):
    stored, scales = ENCODE(name, values, encoding)
    packed = stored.view(torch.uint8)
    return ((packed >> 4) | (packed << 4)).view(torch.int32), scales


def _truncated(name: str, values: torch.Tensor, encoding: object):
    stored, scales = ENCODE(name, values - values.abs().amax(1, keepdim=True) / 15, encoding)
    return stored, scales


ENCODE = quantize.encode_band


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (_doubled, "quantized.error"),
        (_shifted, "quantized.error"),
        (_nan, "quantized.scale-nonfinite"),
        (_nibbles, "quantized.error"),
        (_truncated, "quantized.error"),
    ],
)
def test_a_wrong_quantization_is_not_published(fault, code, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "encode_band", fault)
    with pytest.raises(NotPublishedError) as red:
        _export(sources["dense"], tmp_path, "int4", skip=NO_LOGITS)
    assert code in {finding.code for result in red.value.outcome.report.results for finding in result.findings}
    assert not (tmp_path / "release").exists()


def test_logits_alone_show_a_quantization_three_times_worse_than_the_librarys(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "encode_band", _doubled)
    with pytest.raises(NotPublishedError) as red:
        _export(sources["dense"], tmp_path, "int8", skip=["quantized=to see the logits alone"])
    codes = {f.code for result in red.value.outcome.report.results for f in result.findings if f.severity == "error"}
    assert "logits.mean-kl" in codes
    assert codes <= {"logits.mean-kl", "logits.p95-kl", "logits.cosine", "logits.top1"}


def test_limits_of_an_encoding_are_the_policys_and_what_it_waives_is_published(sources, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("limits:\n  INT8: {mean_kl: 1e-12}\n")
    with pytest.raises(NotPublishedError) as red:
        _export(sources["dense"], tmp_path, "int8", policy=policy)
    found = [f for result in red.value.outcome.report.results for f in result.findings if f.severity == "error"]
    assert [finding.code for finding in found] == ["logits.mean-kl"]
    waiver = "{code: logits.mean-kl, owner: Ada, reason: known to be coarse, expires: 9999-12-31}"
    policy.write_text(f"limits:\n  INT8: {{mean_kl: 1e-12}}\nwaivers:\n  - {waiver}\n")
    outcome = _export(sources["dense"], tmp_path, "int8", policy=policy)
    assert outcome.verdict.line.startswith("published, 1 finding waived: logits.mean-kl (Ada until 9999-12-31)")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"family": "none"}, "needs a family"),
        ({"quantize": "int3"}, "no encoding 'int3'.*int8-w8a8"),
    ],
)
def test_requests_that_cannot_be_quantized_are_refused(options, word, sources, tmp_path):
    with pytest.raises(ValueError, match=word):
        _export(sources["dense"], tmp_path, "int8", **options)


def test_model_whose_config_is_quantized_already_is_refused(sources, tmp_path):
    _export(sources["dense"], tmp_path, "int8", skip=NO_LOGITS)
    with pytest.raises(RequestError, match="quantized already"):
        _export(tmp_path / "release", tmp_path / "again", "int8", skip=NO_LOGITS)


def test_absent_library_is_named_with_the_command_that_installs_it(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.compressed.find_spec", lambda _: None)
    with pytest.raises(RequestError, match="pip install 'compressed-tensors"):
        _export(sources["dense"], tmp_path, "int8")
