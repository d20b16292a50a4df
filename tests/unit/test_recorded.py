"""Recorded logits: what is accepted, and one refusal per way a recording cannot be the model's."""

import pytest
import torch
from safetensors.torch import save_file

from reports.errors import FormatError
from tasks.witnesses.recorded import read_recorded

IDS = torch.tensor([[0, 3, 8], [1, 1, 2]])
LOGITS = torch.zeros(2, 3, 9)


def _write(path, tensors, computed_in="fp32"):
    metadata = {"format": "pt"} | ({"computed_in": computed_in} if computed_in else {})
    save_file(tensors, path, metadata=metadata)
    return path


def _read(path, **changed):
    return read_recorded(path, **{"vocab": 9, "reachable": 9, "max_position": 16} | changed)


@pytest.mark.parametrize(("spelled", "code"), [("fp32", "F32"), ("bfloat16", "BF16"), ("fp16", "F16")])
def test_a_recording_is_read_with_the_dtype_it_was_computed_in(tmp_path, spelled, code):
    found = _read(_write(tmp_path / "golden.safetensors", {"input_ids": IDS, "logits": LOGITS, "more": IDS + 1}, spelled))
    assert (found.computed_in, found.vocab) == (code, 9)
    assert torch.equal(found.input_ids, IDS)


def test_a_trainer_may_leave_out_the_padding_behind_the_reachable_ids(tmp_path):
    path = _write(tmp_path / "golden.safetensors", {"input_ids": IDS, "logits": LOGITS})
    assert _read(path, vocab=16).vocab == 9


NAN = torch.full((2, 3, 9), float("nan"))
FAULTS = [
    ({"ids": IDS, "logits": LOGITS}, "fp32", {}, "holds ids, logits"),
    ({"input_ids": IDS, "logits": LOGITS}, "", {}, "computed_in is None"),
    ({"input_ids": IDS, "logits": LOGITS}, "int8", {}, "computed_in is 'int8'"),
    ({"input_ids": IDS.int(), "logits": LOGITS}, "fp32", {}, "input_ids are torch.int32"),
    ({"input_ids": IDS[0], "logits": LOGITS}, "fp32", {}, r"input_ids are torch.int64 \(3,\)"),
    ({"input_ids": IDS, "logits": LOGITS.half()}, "fp32", {}, "logits are torch.float16"),
    ({"input_ids": IDS, "logits": LOGITS[:, :2].contiguous()}, "fp32", {}, "logits are"),
    ({"input_ids": IDS, "logits": LOGITS}, "fp32", {"vocab": 8, "reachable": 8}, "9 columns, this model's vocabulary needs 8"),
    ({"input_ids": IDS, "logits": LOGITS}, "fp32", {"vocab": 16, "reachable": 12}, "9 columns, this model's vocabulary needs 12 to 16"),
    ({"input_ids": IDS, "logits": LOGITS}, "fp32", {"max_position": 2}, "rows of 3 tokens, this model takes 2"),
    ({"input_ids": IDS + 1, "logits": LOGITS}, "fp32", {}, "ids from 1 to 9, the vocabulary has 9"),
    ({"input_ids": IDS - 1, "logits": LOGITS}, "fp32", {}, "ids from -1"),
    ({"input_ids": IDS, "logits": NAN}, "fp32", {}, "54 logits are not finite"),
]


@pytest.mark.parametrize(("tensors", "computed_in", "changed", "message"), FAULTS, ids=[row[3] for row in FAULTS])
def test_a_recording_that_cannot_be_the_models_is_refused(tmp_path, tensors, computed_in, changed, message):
    path = _write(tmp_path / "golden.safetensors", tensors, computed_in)
    with pytest.raises(FormatError, match=message):
        _read(path, **changed)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "golden.safetensors").write_bytes(b"{}")
    with pytest.raises(FormatError, match="not readable as safetensors"):
        _read(tmp_path / "golden.safetensors")
