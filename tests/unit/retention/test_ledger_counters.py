"""The ledger's own way to a save's counters opens less than a drill does, and finds the same."""

import pytest
import torch

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.restoring.facts import gather_counters
from tests.builders.cases import find_case
from tests.builders.dcp import save_alone
from validators.drills.consistency import count_tokens, train_step

WEIGHT = torch.arange(6.0).reshape(2, 3)
TRAINER = {"optim": {"state": {"w": {"exp_avg": WEIGHT, "step": torch.tensor(9.0)}}}, "rng": {"rank_0": torch.get_rng_state()}}


@pytest.mark.parametrize(
    ("state", "step", "tokens"),
    [
        ({"train_state": {"step": 7, "ntokens_seen": 70}}, 7, 70),
        ({"trainer": {"global_step": torch.tensor(7)}, "consumed_tokens": 70}, 7, 70),
        ({"iteration": 7, "sampler": {"tokens_seen": 70}}, 7, 70),
        ({"lr_scheduler": {"last_epoch": 7}}, None, None),
        ({"train_state": {"step": 7, "ntokens_seen": 0}}, 7, 0),
    ],
)
def test_counters_are_found_beside_optimizer_schedule_and_generator(tmp_path, state, step, tokens):
    save_alone({"model": {"w": WEIGHT}, **TRAINER, **state}, tmp_path / "step-7")
    reader = open_checkpoint(tmp_path / "step-7")
    values = gather_counters(reader.catalog(), reader.payload)
    assert (train_step(values), count_tokens(values)) == (step, tokens)
    assert not [key for key in values if key.startswith(("optim", "rng", "lr_scheduler", "step/"))]


@pytest.mark.parametrize(
    ("case", "inner", "counters"),
    # as case.json and the trainer's own files tell
    [
        ("fsdp2_w2_llama_untied", "", (3, 144)),
        ("torchtitan_llama3_w2", "", (3, 144)),
        ("mg_qwen3_tp2_torchdist", "iter_0000010", (10, 8 * 16)),
        ("ds_zero2_bf16_tied", "", (4, 128)),
        ("ds_universal_from_zero2", "", (4, 128)),
        ("hf_trainer_llama", "checkpoint-3", (3, None)),
    ],
)
def test_counters_of_recorded_saves(case, inner, counters):
    folder = find_case(case) / "ckpt" / inner
    reader = open_checkpoint(folder)
    values = gather_counters(reader.catalog(), reader.payload)
    assert (train_step(values), count_tokens(values)) == counters
