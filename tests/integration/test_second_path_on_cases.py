"""The second path yields the recorded weights of every recorded checkpoint it can decode."""

from dataclasses import replace

import pytest
import torch

from tasks.measure import measure
from tests.builders.cases import find_case, identity, llama_from_torchtitan, mixtral_from_fused
from tests.builders.plans import write_plan
from tests.builders.released import expected_tensors, write_release

pytestmark = pytest.mark.cases

# Case, folder below ckpt, format, mapping.
CASES = [
    ("fsdp2_w2_llama_untied", "", "dcp", identity),
    ("fsdp2_w2_mixtral_flatopt", "", "dcp", mixtral_from_fused),
    ("fsdp2_w2_gpt2_tied", "", "dcp", identity),
    ("tp2_fsdp2_w4_llama", "", "dcp", identity),
    ("fsdp2_w4_uneven_llama_tied_bf16", "", "dcp", identity),
    ("fsdp1_sharded_w2_llama_tied", "", "dcp", identity),
    ("accelerate_fsdp2_w2_llama", "", "dcp", identity),
    ("torchtitan_llama3_w2", "step-3", "dcp", llama_from_torchtitan),
    ("dcp_hf_sharded_w2_llama", "", "dcp_hf", identity),
    ("hf_shards_llama_tied", "", "hf", identity),
    ("hf_shards_llama_tied_bin", "", "hf", identity),
    ("hf_trainer_llama", "checkpoint-3", "hf", identity),
]


@pytest.mark.parametrize("code", ["source", "BF16"])
@pytest.mark.parametrize(("name", "below", "source_format", "mapping"), CASES, ids=[row[0] for row in CASES])
def test_every_recorded_weight_is_derived_again_bit_for_bit(tmp_path, name, below, source_format, mapping, code):
    case = find_case(name)
    expected = expected_tensors(case, without_tied_head="_tied" in name)
    targets = mapping(expected)
    if code == "BF16":
        expected = {key: value.to(torch.bfloat16) for key, value in expected.items()}
        targets = [replace(target, dtype=code) for target in targets]
    root = case / "ckpt" / below
    plan = write_plan(tmp_path / "plan.json", source_format, root, targets)
    found = measure(write_release(tmp_path / "release", expected), plan_path=plan, source_roots=(root,), workers=2)
    assert found.witness.heard
    assert len(found.values) == len(expected)
    assert found.values["differing"].sum() == 0


def test_a_source_with_a_rank_missing_is_not_taken_for_whole(tmp_path):
    root = find_case("damaged_hf_shard_first_missing") / "ckpt"
    expected = expected_tensors(find_case("dcp_hf_sharded_w2_llama"))
    name = "model.embed_tokens.weight"
    plan = write_plan(tmp_path / "plan.json", "dcp_hf", root, identity({name: expected[name]}))
    with pytest.raises(ValueError, match="does not tile"):
        measure(write_release(tmp_path / "release", {name: expected[name]}), plan_path=plan, source_roots=(root,), workers=2)
