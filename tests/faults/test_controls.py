"""What is sound passes: no finding of severity error, no crash, and every check that can run examines something."""

import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch

from tests.builders.editing import edit_tensors, set_fields
from tests.builders.measuring import measure_tensors, measure_values
from tests.builders.releases import build_release
from tests.faults.faults_in_weights import cast, fill_all, swap
from tests.faults.planting import gather, judge_all
from validators.release import open_release

SKIPPED_WITHOUT_LOGITS = {"logits", "manifest"}


def assert_sound(results, *, skipped=SKIPPED_WITHOUT_LOGITS):
    """Assert that everything ran, looked at something, and found no error."""
    assert {result.check: result.reason for result in results if result.status in {"errored", "failed"}} == {}
    assert {result.check for result in results if result.status == "skipped"} == set(skipped)
    assert [result.check for result in results if result.status == "passed" and result.examined == 0] == []


@pytest.mark.parametrize("name", ["dense", "tied", "moe", "router_bias", "zero2", "zero3", "zero2_tied", "zero2_experts"])
def test_sound_release_has_no_finding_at_all(name, sound):
    results = judge_all(gather(sound[name].folder, sound[name].folder, sound[name]))
    assert_sound(results)
    assert [finding for result in results for finding in result.findings] == []


@pytest.mark.parametrize("name", ["dense", "router_bias"])
@pytest.mark.parametrize(
    "plant", [lambda folder: None, swap((".layers.0.", ".layers.1.")), cast(torch.bfloat16)], ids=["sound", "swapped", "cast"]
)
def test_product_measures_as_torch_does_on_whole_tensors(name, plant, sound, tmp_path):
    source, folder = sound[name].folder, tmp_path / "release"
    shutil.copytree(source, folder)
    plant(folder)
    stored = {tensor.dtype for tensor in open_release(folder).stored()}
    evidence = gather(folder, source, sound[name], dtype="BF16" if stored == {"BF16"} else "")
    compared = ~evidence.values["name"].isin(sound[name].expected.keep_fp32)  # planned in fp32, so not compared with a cast one
    for ours, theirs in ((evidence.tensors, measure_tensors(folder)), (evidence.values[compared], measure_values(folder, source))):
        ours, theirs = (table.set_index("name").sort_index() for table in (ours, theirs))
        sums = [column for column in theirs.columns if column in ("rms", "mean")]  # six digits
        exact = [column for column in theirs.columns if column not in ("relative_error", "sample", *sums)]
        pd.testing.assert_frame_equal(ours[exact], theirs.loc[ours.index, exact], check_dtype=False, rtol=1e-9)
        pd.testing.assert_frame_equal(ours[sums], theirs.loc[ours.index, sums], check_dtype=False, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("code", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
@pytest.mark.parametrize("name", ["dense", "moe", "router_bias"])
def test_honest_cast_passes(name, code, dtype, sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound[name].folder, folder)
    cast(dtype, *sound[name].expected.keep_fp32)(folder)
    set_fields(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
    assert_sound(judge_all(gather(folder, sound[name].folder, sound[name], dtype=code)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), [("dense", "BF16"), ("moe", "BF16 MoE")])
def test_honest_cast_passes_the_logits(name, row, sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound[name].folder, folder)
    cast(torch.bfloat16)(folder)
    set_fields(folder / "config.json", dtype="bfloat16")
    assert_sound(judge_all(gather(folder, sound[name].folder, sound[name], dtype="BF16", logits=row)), skipped={"manifest"})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), [("megatron", "F32"), ("megatron_moe", "F32 MoE")])
def test_a_sound_release_passes_what_megatrons_own_ranks_compute(name, row, sound):
    evidence = gather(sound[name].folder, sound[name].folder, sound[name], logits=row)
    assert evidence.logits[0].metrics["max_abs"] <= 1e-4
    assert_sound(judge_all(evidence), skipped={"manifest"})


def test_same_weights_in_one_file_pass(sound, tmp_path):
    build_release("dense", tmp_path, max_shard="1GB")
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert_sound(judge_all(gather(tmp_path, sound["dense"].folder, sound["dense"])))


def test_norms_of_all_ones_in_every_layer_pass_without_a_word(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["dense"].folder, folder)
    fill_all("norm.weight", 1.0)(folder)
    results = judge_all(gather(folder, folder, sound["dense"]))
    assert_sound(results)
    assert [finding for result in results for finding in result.findings] == []


def test_biases_of_all_zeros_in_every_layer_pass_without_a_word(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["tied"].folder, folder)
    fill_all("proj.bias", 0.0)(folder)
    results = judge_all(gather(folder, folder, sound["tied"]))
    assert_sound(results)
    assert [finding for result in results for finding in result.findings] == []


def test_kept_tied_head_passes(sound, tmp_path):
    folder, head = tmp_path / "release", "lm_head.weight"
    shutil.copytree(sound["tied"].folder, folder)
    edit_tensors(folder, lambda tensors: tensors.update({head: tensors["model.embed_tokens.weight"]}))
    assert_sound(judge_all(gather(folder, folder, sound["tied"])))


def test_router_bias_may_stay_in_the_precision_of_a_bf16_source(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["router_bias"].folder, folder)
    cast(torch.bfloat16)(folder)
    set_fields(folder / "config.json", dtype="bfloat16")
    assert_sound(judge_all(gather(folder, folder, sound["router_bias"], dtype="BF16")))


def test_without_family_values_tables_or_tokenizer_the_checks_say_why_they_are_skipped(sound, tmp_path):
    folder = tmp_path / "release"
    shutil.copytree(sound["dense"].folder, folder)
    for path in folder.glob("*token*"):
        path.unlink()
    evidence = gather(folder, folder, sound["dense"])
    reasons = {"family": "family none", "values": "source not given"}
    results = judge_all(replace(evidence, expected=None, plan=None, tensors=None, values=None, reasons=reasons))
    skipped = {result.check: result.reason for result in results if result.status == "skipped"}
    assert skipped == {
        **dict.fromkeys(["inventory", "shapes", "tied", "experts"], "family none"),
        **dict.fromkeys(["finite", "duplicates", "rows", "outliers"], "no tensor measured"),
        **{
            "manifest": "not made by `shardwright export`",
            "values": "source not given",
            "tokenizer": "none given",
            "logits": "no logits compared",
        },
    }
    assert {result.check: result.status for result in results if result.status != "skipped"} == dict.fromkeys(
        ["files", "secrets", "config", "quantized"], "passed"
    )
