"""Drills of recorded checkpoints: sound ones are restorable, their logged continuation comes back bit for bit, damaged ones are refused."""

import json
import shutil
from pathlib import Path

import pytest

from flows.recording import record_checkpoint
from tests.builders.cases import find_case
from tests.integration.test_drill import codes, drill, measured

pytestmark = pytest.mark.cases

FULL = (
    "accelerate_fsdp2_w2_llama",
    "fsdp2_w2_gpt2_tied",
    "fsdp2_w2_llama_untied",
    "fsdp2_w2_mixtral_flatopt",
    "fsdp2_w4_uneven_llama_tied_bf16",
    "torchtitan_llama3_w2",
    "tp2_fsdp2_w4_llama",
)
OTHER_FORMATS = (
    *("ds_pipe_pp2_zero1", "ds_universal_from_zero2", "ds_zero1_bf16", "ds_zero1_bf16_frozen", "ds_zero1_bf16opt", "ds_zero2_bf16_tied"),
    *("ds_zero2_bf16_ws3", "ds_zero2_moe_ep2", "ds_zero3_bf16", "ds_zero3_fp32_frozen", "hf_trainer_llama"),
    *("mg_gpt2_tied_tp2pp2_legacy", "mg_llama_distopt_tp2dp2_legacy", "mg_llama_untied_tp2pp2_legacy", "mg_mixtral_tp2ep2_etp1_legacy"),
)
CONTINUED = {
    "fsdp2_w2_llama_untied": "llama",
    "fsdp2_w2_gpt2_tied": "gpt2",
    "fsdp2_w2_mixtral_flatopt": "mixtral",
    "fsdp2_w4_uneven_llama_tied_bf16": "llama_tied_bf16",
}
DAMAGED = {
    "damaged_no_metadata": "commit.uncommitted",
    "damaged_metadata_truncated": "commit.cut-short",
    "damaged_rank3_missing": "commit.ranks-missing",
    "damaged_rank1_bitflip": "commit.damaged",
}
SAVED_AT = 3


def _copy(name: str, root: Path, step: int) -> Path:
    return Path(shutil.copytree(find_case(name) / "ckpt", root / f"step-{step}", copy_function=shutil.copyfile))


def _errors(outcome) -> list[str]:
    return [f"{f.code} {f.where} {f.found}" for r in outcome.report.results for f in r.findings if f.severity == "error"]


@pytest.mark.parametrize("name", FULL)
def test_a_recorded_checkpoint_is_restorable(name, tmp_path):
    case = find_case(name)
    outcome = drill(case / "ckpt", runs=tmp_path / "runs")
    assert (_errors(outcome), outcome.verdict.green) == ([], True)
    assert measured(outcome, "commit")["complete"] == 1


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_recorded_checkpoint_of_another_framework_is_restorable(name, tmp_path):
    case = find_case(name)
    outcome = drill(case / "ckpt", runs=tmp_path / "runs")
    assert (_errors(outcome), outcome.verdict.green) == ([], True)
    assert set(measured(outcome, "negative").values()) == {"refused, no older save"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2_fsdp2_w4_llama", "accelerate_fsdp2_w2_llama", "torchtitan_llama3_w2"])
def test_torch_restores_it_at_other_world_sizes(name, tmp_path):
    outcome = drill(find_case(name) / "ckpt", runs=tmp_path / "runs", level="D3", max_ranks=4)
    assert (_errors(outcome), outcome.verdict.green) == ([], True)
    found = measured(outcome, "restore")
    assert set(found["world sizes"].split(", ")) == {"1", "2", "4"}
    assert found["saved again"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
def test_the_logged_continuation_comes_back(name, tmp_path):
    pytest.importorskip("torchdata", reason="cases: the recorded run's loader is torchdata's")
    case = json.loads((find_case(name) / "case.json").read_text())
    with (tmp_path / "log.jsonl").open("w") as log:
        for rank in case["continuation"]:
            for number, loss in enumerate(rank["losses_after"]):
                lr = [rank["lr"][number]] * 2
                log.write(json.dumps({"step": SAVED_AT + 1 + number, "rank": rank["dp_rank"], "loss": loss, "lr": lr}) + "\n")
    resume = f"tests.builders.case_trainer:{CONTINUED[name]}"
    outcome = drill(find_case(name) / "ckpt", runs=tmp_path / "runs", log=tmp_path / "log.jsonl", resume=resume, level=None, max_ranks=4)
    assert (_errors(outcome), outcome.verdict.green) == ([], True)
    found = measured(outcome, "resume")
    assert found["steps compared with the log"] == 2 * len(case["continuation"])
    assert found["state values compared"] > 100
    # Bit for bit on the kind of CPU that recorded them; torch alone, on another one, differs in the last digits of some.
    assert found["largest difference of a loss"] <= (1e-5 if "bf16" not in name else 0.02)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_save_is_refused_and_an_older_one_chosen(name, tmp_path):
    root = tmp_path / "run"
    _copy("fsdp2_w2_llama_untied", root, 2)
    _copy(name, root, SAVED_AT)
    outcome = drill(root)
    assert DAMAGED[name] in codes(outcome)
    assert measured(outcome, "commit")["chosen"] == "step-2"


@pytest.mark.parametrize("name", ["ds_zero2_bf16_ws3", "mg_llama_untied_tp2pp2_legacy", "accelerate_fsdp2_w2_llama", "hf_trainer_llama"])
def test_a_record_inside_a_save_of_any_format_is_found_again(name, tmp_path):
    root = Path(shutil.copytree(find_case(name) / "ckpt", tmp_path / "ckpt", copy_function=shutil.copyfile))
    _, entries = record_checkpoint(root, (), None, replace=False, workers=1)
    outcome = drill(root)
    assert (_errors(outcome), outcome.verdict.green) == ([], True)
    assert measured(outcome, "state")["compared with a record"] == entries
