"""Samples and repeated rows, as the measuring pass keeps them: the same however a tensor is cut, and written as text."""

import pytest
import torch

from tasks import measure as measuring
from tasks.measure import measure
from tasks.sketch import Rows, Sample
from tasks.witnesses.boxes import Box
from tests.builders.released import write_release
from validators.sampled import Run, format_runs, parse_runs, sample_values


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def _tiles(rows: int, columns: int, height: int, width: int) -> list[Box]:
    return [Box((r, c), (min(height, rows - r), min(width, columns - c))) for c in range(0, columns, width) for r in range(0, rows, height)]


def _cut(values: torch.Tensor, box: Box) -> torch.Tensor:
    (r, c), (height, width) = box.offset, box.shape
    return values[r : r + height, c : c + width].contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("height", "width"), [(24, 16), (5, 16), (7, 3), (1, 1)])
def test_sample_is_the_same_however_the_tensor_is_cut(dtype, height, width):
    values = _normal(24, 16, dtype=dtype)
    whole, cut = Sample((24, 16)), Sample((24, 16))
    whole.add(values, Box((0, 0), (24, 16)))
    for box in _tiles(24, 16, height, width):
        cut.add(_cut(values, box), box)
    assert cut.text == whole.text
    code = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}[dtype]
    assert set(sample_values(bytes.fromhex(whole.text), code)) <= set(values.double().flatten().tolist())


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 2)])
def test_small_tensor_is_sampled_whole(shape):
    values, sample = _normal(*shape), Sample(shape)
    sample.add(values, Box((0,) * len(shape), shape))
    assert sample_values(bytes.fromhex(sample.text), "F32").tolist() == values.double().reshape(-1).tolist()


def test_fused_experts_have_a_sample_each_alike_in_place():
    values, fused, alone = _normal(5, 12, 8), Sample((5, 12, 8), 5), Sample((12, 8))
    for at in range(5):
        fused.add(values[at : at + 1, :6].contiguous(), Box((at, 0, 0), (1, 6, 8)))
        fused.add(values[at : at + 1, 6:].contiguous(), Box((at, 6, 0), (1, 6, 8)))
    alone.add(values[3], Box((0, 0), (12, 8)))
    assert fused.text[3 * len(alone.text) : 4 * len(alone.text)] == alone.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), [(40, 6), (7, 6), (9, 2), (3, 5)])
def test_repeated_rows_are_found_however_the_matrix_is_cut(dtype, height, width):
    values = _normal(40, 6, dtype=dtype)
    values[3:5] = torch.tensor([0.0, -0.0]).repeat(3)
    values[10] = values[2]
    values[20:26] = values[12:18]
    values[30:33] = values[7]
    values[11] = -values[9]
    rows = Rows((40, 6))
    for box in _tiles(40, 6, height, width):
        piece = _cut(values, box)
        rows.add(piece, box, int((piece == 0).sum()))
    assert rows.text == "3:5=zero 10:11=2 20:26=12+ 30:33=7"


def test_rows_that_differ_in_signs_alone_are_not_equal():
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0])] * 6)
    rows = Rows((64, 24))
    rows.add((signs.repeat_interleave(4, 1) * _normal(24)).bfloat16(), Box((0, 0), (64, 24)), 0)
    assert rows.text == ""


def test_runs_are_read_as_they_were_written():
    runs = [Run(0, 2, -1, 0), Run(5, 6, 0, 0), Run(6, 9, 1, 1), Run(9, 12, 4, 0)]
    assert parse_runs(format_runs(runs)) == runs
    with pytest.raises(ValueError, match="3:4: not a run"):
        parse_runs("1:2=0 3:4")


@pytest.mark.parametrize("piece_numel", [16, 1 << 19])
def test_measuring_keeps_rows_of_matrices_outside_the_layers_alone(tmp_path, monkeypatch, piece_numel):
    monkeypatch.setattr(measuring, "_PIECE_NUMEL", piece_numel)
    repeating = torch.cat([_normal(8, 4), _normal(8, 4)])
    tensors = {"embed.weight": repeating, "layers.0.w.weight": repeating.clone(), "norm.weight": torch.zeros(4), "none": torch.empty(0, 4)}
    table = measure(write_release(tmp_path, tensors), plan_path=None, source_roots=(), workers=2).tensors.set_index("name")
    assert table["repeated"].to_dict() == {"embed.weight": "8:16=0+", "layers.0.w.weight": "", "norm.weight": "", "none": ""}
    assert table["sample"]["layers.0.w.weight"] == table["sample"]["embed.weight"]
    assert table["sample"]["none"] == ""
