"""What a cast may lose, what a copy may not, and that a tied copy left out is proven to be one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reports.errors import EncodingError, ReplicaError
from tasks.engine.families.llama import LLAMA
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.execute import FileRecord, execute_file
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.catalogs import LLAMA_CONFIG, LLAMA_SHAPES, request_of
from tests.builders.shardings import FakeReader

TIED = request_of(LLAMA, LLAMA_CONFIG | {"tie_word_embeddings": True})


def _bits(tensor: torch.Tensor) -> np.ndarray:
    width = tensor.element_size()
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).numpy().view(f"u{width}")


def _write(folder: Path, values: torch.Tensor, source: str, target: str) -> tuple[FileRecord, torch.Tensor]:
    reader = FakeReader.write(folder / "ckpt", {"w": _bits(values)}, {"w": source}, seed=3)
    (file,) = make_plan(reader.catalog(), PlanRequest(dtype=target)).files
    record = execute_file(file, SourceBytes(reader, reader.catalog()), folder / file.name)
    return record, load_file(folder / file.name)["w"]


@pytest.mark.parametrize(
    ("dtype", "source", "target", "value"),
    [
        (torch.float32, "F32", "F16", 65520.0),
        (torch.float32, "F32", "BF16", 3.4e38),
        (torch.bfloat16, "BF16", "F16", -1e5),
        (torch.float64, "F64", "F32", 1e39),
        (torch.float64, "F64", "BF16", -1e300),
    ],
)
def test_a_value_that_would_become_infinite_is_refused_with_the_dtype_to_use(tmp_path, dtype, source, target, value):
    values = torch.ones(3, 4, dtype=dtype)
    values[2, 3] = value
    with pytest.raises(EncodingError, match=rf"^w: would be infinite in {target} at 1 of .*--dtype bf16 or --dtype source"):
        _write(tmp_path, values, source, target)


def test_the_largest_values_that_fit_are_cast(tmp_path):
    values = torch.tensor([65504.0, -65519.0, 65519.99], dtype=torch.float32)
    _, found = _write(tmp_path, values, "F32", "F16")
    assert torch.equal(found, values.to(torch.float16))
    assert torch.isfinite(found).all()


def test_infinities_and_nans_of_the_source_are_no_overflow(tmp_path):
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    record, found = _write(tmp_path, values, "F32", "F16")
    assert torch.equal(found.isnan(), values.isnan())
    assert found[:2].tolist() == [float("inf"), float("-inf")]
    assert record.flushed == ()


def test_values_flushed_to_zero_are_counted_and_zeros_are_not(tmp_path):
    values = torch.tensor([1e-9, -1e-9, 0.0, -0.0, 1e-7, 1.0])
    record, found = _write(tmp_path, values, "F32", "F16")
    assert record.flushed == (("w", 2),)
    assert torch.equal(found, values.to(torch.float16))


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800000, 0x80000000, 0x00000001])
def test_a_copy_keeps_every_nan_payload_signed_zero_and_subnormal(tmp_path, bits):
    values = torch.from_numpy(np.full((2, 3), bits, dtype=np.uint32).view(np.int32)).view(torch.float32)
    _, found = _write(tmp_path, values, "F32", "F32")
    assert np.array_equal(_bits(found), np.full((2, 3), bits, dtype=np.uint32))


def _tied(folder: Path, head: np.ndarray, dtype: str = "F32") -> int:
    rng = np.random.default_rng(1)
    tensors = {name: rng.integers(0, 2**32, shape, dtype=np.uint32) for name, shape in LLAMA_SHAPES.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy() if head is None else head(tensors["model.embed_tokens.weight"])
    dtypes = dict.fromkeys(tensors, "F32") | {"lm_head.weight": dtype}
    reader = FakeReader.write(folder, tensors, dtypes, seed=5)
    return check_replicas(make_plan(reader.catalog(), TIED), SourceBytes(reader, reader.catalog()))


def test_a_tied_copy_is_compared_to_its_last_byte(tmp_path):
    assert _tied(tmp_path, None) == 10 * 8 * 4


@pytest.mark.parametrize("row", [0, 9])
def test_a_tied_head_with_one_other_bit_is_refused_naming_the_row(tmp_path, row):
    def changed(embedding: np.ndarray) -> np.ndarray:
        head = embedding.copy()
        head[row, 7] ^= 1
        return head

    with pytest.raises(ReplicaError, match=rf"^lm_head\.weight: row {row} differs from model\.embed_tokens\.weight.*tie_word_embeddings"):
        _tied(tmp_path, changed)


def test_a_tied_head_of_another_dtype_is_refused(tmp_path):
    with pytest.raises(ReplicaError, match=r"^lm_head\.weight: "):
        _tied(tmp_path, lambda embedding: embedding.astype(np.uint16), "BF16")


def test_a_tied_head_of_another_dtype_of_the_same_width_is_refused(tmp_path):
    with pytest.raises(ReplicaError, match=r"^lm_head\.weight: is I32, but model\.embed_tokens\.weight is F32"):
        _tied(tmp_path, lambda embedding: embedding.copy(), "I32")
