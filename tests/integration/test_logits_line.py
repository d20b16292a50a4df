"""The logits comparisons of one export, on recorded checkpoints: sound releases are within their limits, mutated ones are not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasks.forward import ForwardError
from tasks.logits_line import LogitsEvidence, Subject, compare, is_within
from tests.builders.cases import find_case
from tests.builders.released import CODES, GOLDEN, expected_tensors, write_release

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]


def _compare(
    folder: Path,
    case: Path,
    *,
    dtype: torch.dtype | None = None,
    merged_change: Change = lambda _: None,
    cast_change: Change = lambda _: None,
    root: Path | None = None,
    source_format: str = "dcp",
    is_moe: bool = False,
    golden: bool = True,
    memory_limit: int = 1 << 30,
) -> LogitsEvidence:
    tensors = expected_tensors(case, without_tied_head="_tied" in case.name)
    source_dtype = next(iter(tensors.values())).dtype
    merged_change(tensors)
    merged = release = write_release(folder / "merged", tensors, assets=case / "hf")
    if dtype is not None:
        cast = {name: value.to(dtype) for name, value in tensors.items()}
        cast_change(cast)
        release = write_release(folder / "release", cast, assets=case / "hf")
    return compare(
        Subject(
            release=release,
            merged=merged,
            source_format=source_format,
            source_roots=(root or case / "ckpt",),
            source_dtype=CODES[source_dtype],
            release_dtype=CODES[dtype or source_dtype],
            is_moe=is_moe,
            golden=case / "ref" / "golden.safetensors" if golden else None,
            tokenizer=case / "hf",
            memory_limit=memory_limit,
            scratch=folder / "scratch",
        )
    )


def _verdicts(found: LogitsEvidence) -> dict[str, bool]:
    return {f"{c.name}: {c.reference}": is_within(c) for c in found.comparisons}


UNTIED, TIED = GOLDEN / "accelerate_llama", GOLDEN / "fsdp2_w4_llama_tied_bf16"
RECORDED, LIVE = "mapping: recorded logits", "mapping: framework's live model"
SAME, CAST = "cast: merged values (nothing is cast)", "cast: merged values"


@pytest.mark.parametrize(
    ("case", "dtype", "expected"),
    [
        (UNTIED, None, [RECORDED, LIVE, SAME]),
        (UNTIED, torch.bfloat16, [RECORDED, LIVE, CAST]),
        (UNTIED, torch.float16, [RECORDED, LIVE, CAST]),
        (TIED, None, [RECORDED, LIVE, SAME]),
        (TIED, torch.float32, [RECORDED, LIVE, CAST]),
    ],
)
def test_a_sound_release_is_within_every_limit(tmp_path, case, dtype, expected):
    found = _compare(tmp_path, case, dtype=dtype)
    assert _verdicts(found) == dict.fromkeys(expected, True)
    assert [(w.name, w.heard) for w in found.witnesses] == [("recorded", True), ("framework", True)]
    assert found.values is not None
    assert found.values["differing"].sum() == 0
    assert not (tmp_path / "scratch").exists()


def test_an_fp32_source_against_fp32_logits_is_held_to_the_fp32_row(tmp_path):
    recorded, live, repeated = _compare(tmp_path, UNTIED).comparisons
    assert [c.limits_row for c in (recorded, live, repeated)] == ["F32", "F32", "F32"]
    assert recorded.limits["mean_kl"] == 1e-7
    assert recorded.metrics["max_abs"] < 1e-6
    assert live.metrics["max_abs"] == 0.0
    assert repeated.metrics["max_abs"] == 0.0


def test_a_cast_is_held_near_the_noise_floor_of_this_run(tmp_path):
    cast = _compare(tmp_path, UNTIED, dtype=torch.bfloat16).comparisons[-1]
    assert cast.limits_row == "BF16"
    assert cast.metrics["mean_kl"] == cast.metrics["noise_floor"] > 0
    assert cast.limits["mean_kl"] == pytest.approx(max(1e-8, 3 * cast.metrics["noise_floor"]))
    assert len(cast.kl_by_position) == 64


def _scale(name: str, by: float) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] * by

    return change


def _to_pairs(tensors: Tensors) -> None:
    # The rows of one q_proj as another RoPE convention would have them: a permutation inside each head (head dim 16).
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64).contiguous()


def _swap_gate_up(tensors: Tensors) -> None:
    gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _swap_norms(tensors: Tensors) -> None:
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


@pytest.mark.parametrize(
    ("change", "layer"),
    [(_to_pairs, "layer 0"), (_swap_gate_up, "layer 1"), (_swap_norms, "layer 0"), (_scale("lm_head.weight", 1.001), "head")],
    ids=["rope pairs", "gate and up", "norms", "scaled head"],
)
def test_a_wrong_mapping_shows_against_the_live_model_and_names_the_layer(tmp_path, change, layer):
    found = _compare(tmp_path, UNTIED, merged_change=change)
    live = next(c for c in found.comparisons if c.reference == "framework's live model")
    assert found.values["differing"].sum() > 0
    assert live.metrics["max_abs"] > 0
    assert live.first_diverging_layer == layer
    assert _verdicts(found)[SAME]


def test_a_wrong_mapping_of_weight_fails_against_the_recorded_logits(tmp_path):
    found = _compare(tmp_path, UNTIED, merged_change=_scale("model.layers.1.mlp.down_proj.weight", 3.0), source_format="hf")
    assert not _verdicts(found)[RECORDED]
    assert not found.witnesses[1].heard


def test_a_damage_after_the_merge_fails_the_cast_and_names_the_layer(tmp_path):
    found = _compare(tmp_path, UNTIED, dtype=torch.bfloat16, cast_change=_scale("model.layers.1.self_attn.o_proj.weight", -1.0))
    cast = found.comparisons[-1]
    assert _verdicts(found)[LIVE]
    assert not is_within(cast)
    assert cast.first_diverging_layer == "layer 1"


def test_a_model_larger_than_memory_is_compared_from_disk_and_the_framework_stays_silent(tmp_path):
    whole = _compare(tmp_path / "whole", UNTIED, dtype=torch.bfloat16)
    parts = _compare(tmp_path / "parts", UNTIED, dtype=torch.bfloat16, memory_limit=100_000)
    assert _verdicts(parts) == {RECORDED: True, CAST: True}
    assert "two fp32 copies need" in parts.witnesses[1].detail
    assert parts.comparisons[-1].metrics == whole.comparisons[-1].metrics
    assert not (tmp_path / "parts" / "scratch").exists()


def test_scratch_left_by_a_killed_run_does_not_stop_the_next(tmp_path):
    (tmp_path / "scratch" / "honest-cast").mkdir(parents=True)
    found = _compare(tmp_path, UNTIED, dtype=torch.bfloat16, golden=False, source_format="hf")
    assert _verdicts(found) == {CAST: True}
    assert not (tmp_path / "scratch").exists()


def test_without_a_golden_the_recorded_witness_is_not_heard_and_says_so(tmp_path):
    found = _compare(tmp_path, UNTIED, golden=False)
    assert [c.reference for c in found.comparisons] == ["framework's live model", "merged values (nothing is cast)"]
    assert "--golden" in found.witnesses[0].detail


def test_an_architecture_transformers_does_not_know_is_not_compared_and_says_why(tmp_path):
    case = tmp_path / "case"
    (case / "hf").mkdir(parents=True)
    (case / "ref").mkdir()
    for file in (UNTIED / "ref").iterdir():
        (case / "ref" / file.name).write_bytes(file.read_bytes())
    (case / "hf" / "config.json").write_text('{"model_type": "not_a_model"}')
    found = _compare(tmp_path, case)
    assert found.comparisons == ()
    assert "not_a_model" in found.reason
    assert not any(witness.heard for witness in found.witnesses)


def test_a_release_with_a_tensor_lost_is_refused(tmp_path):
    with pytest.raises(ForwardError, match=r"model\.norm\.weight"):
        _compare(tmp_path, UNTIED, merged_change=lambda tensors: tensors.pop("model.norm.weight"), source_format="hf")
    assert not (tmp_path / "scratch").exists()


@pytest.mark.cases
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["source", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "below", "is_moe", "has_live_names"),
    [
        ("fsdp2_w2_llama_untied", "", False, True),
        ("fsdp2_w2_mixtral_flatopt", "", True, True),
        ("fsdp2_w2_gpt2_tied", "", False, True),
        ("tp2_fsdp2_w4_llama", "", False, True),
        ("fsdp1_sharded_w2_llama_tied", "", False, True),
        ("torchtitan_llama3_w2", "step-3", False, False),
    ],
)
def test_every_recorded_case_is_within_every_limit(tmp_path, name, below, is_moe, has_live_names, dtype):
    case = find_case(name)
    found = _compare(tmp_path, case, dtype=dtype, root=case / "ckpt" / below, is_moe=is_moe)
    assert all(_verdicts(found).values())
    assert found.witnesses[1].heard == has_live_names
    if has_live_names:
        assert found.values["differing"].sum() == 0


@pytest.mark.cases
def test_a_torchtitan_source_without_its_rope_permutation_fails_against_the_recorded_logits(tmp_path):
    def forget(tensors: Tensors) -> None:
        for name in [key for key in tensors if key.endswith(("q_proj.weight", "k_proj.weight"))]:
            tensors[name] = tensors[name].view(-1, 2, 8, 64).transpose(1, 2).reshape(tensors[name].shape).contiguous()

    case = find_case("torchtitan_llama3_w2")
    found = _compare(tmp_path, case, root=case / "ckpt" / "step-3", merged_change=forget)
    assert not _verdicts(found)[RECORDED]
