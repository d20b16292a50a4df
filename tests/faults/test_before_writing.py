"""What headers, config and tokenizer show is found before the first byte is written, on a release that is only planned."""

import shutil
from dataclasses import replace

import pytest

from tests.faults.faults_in_files import FAULTS as IN_FILES
from tests.faults.faults_in_structure import FAULTS as IN_STRUCTURE
from tests.faults.faults_in_weights import FAULTS as IN_WEIGHTS
from tests.faults.planting import gather
from validators.check import run
from validators.checks import CHECKS_BEFORE_WRITING

# Of the planted faults, those that a plan shows.
SHOWN_BY_A_PLAN = (
    "tensor_missing",
    "extra_random_layer",
    "prefix_orig_mod",
    "gate_transposed",
    "vocab_tail_lost",
    "untied_head_missing",
    "missing_expert",
    "router_row_lost",
    "plan_feeds_wrong_expert",
    "tokenizer_too_big",
    "eos_mismatch",
    "kv_heads_wrong",
    "dtype_config_wrong",
)
FAULTS = {fault.name: fault for fault in (*IN_FILES, *IN_WEIGHTS, *IN_STRUCTURE)}


def plan_only(evidence):
    """Return evidence as it stands before writing: no folder, no tables of bytes."""
    release = replace(evidence.release, folder=None, index={}, others=(), manifest={})
    return replace(evidence, release=release, tensors=None, values=None, logits=())


@pytest.mark.parametrize("name", SHOWN_BY_A_PLAN)
def test_fault_is_caught_before_writing(name, sound, tmp_path):
    fault, base = FAULTS[name], sound[FAULTS[name].base]
    shutil.copytree(base.folder, tmp_path / "release")
    fault.plant(tmp_path / "release")
    evidence = plan_only(gather(tmp_path / "release", base.folder, base))
    results = [run(check, fault.amend(evidence) if fault.amend else evidence, lambda: 0.0) for check in CHECKS_BEFORE_WRITING]
    assert [result.reason for result in results if result.status == "errored"] == []
    assert fault.code in {finding.code for result in results for finding in result.findings}


@pytest.mark.parametrize("name", ["dense", "tied", "moe", "router_bias"])
def test_sound_plan_passes_every_check_that_runs_before_writing(name, sound):
    evidence = plan_only(gather(sound[name].folder, sound[name].folder, sound[name]))
    results = [run(check, evidence, lambda: 0.0) for check in CHECKS_BEFORE_WRITING]
    assert {result.check: result.status for result in results} == {check.name: "passed" for check in CHECKS_BEFORE_WRITING}
    assert [finding for result in results for finding in result.findings] == []
