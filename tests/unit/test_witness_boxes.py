"""Boxes: meeting, cutting and reading, against torch's own indexing."""

from pathlib import Path

import pytest
import torch

from reports.errors import FormatError
from tasks.witnesses import boxes
from tasks.witnesses.boxes import Box, overlaps, read_box

BOXES = [
    ((), (), ()),
    ((7,), (2,), (4,)),
    ((6, 5), (0, 0), (6, 5)),
    ((6, 5), (1, 0), (3, 5)),
    ((6, 5), (1, 2), (4, 2)),
    ((3, 4, 5), (1, 1, 2), (2, 2, 3)),
    ((3, 4, 5), (2, 0, 0), (1, 4, 5)),
    ((3, 4, 5), (0, 3, 4), (3, 1, 1)),
]


def _cut_out(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@pytest.fixture
def stored(tmp_path: Path):
    def write(shape: tuple[int, ...], lead: int = 3) -> tuple[torch.Tensor, Path]:
        tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
        path = tmp_path / "values"
        path.write_bytes(b"x" * lead + tensor.numpy().tobytes())
        return tensor, path

    return write


@pytest.mark.parametrize(("span", "gap"), [(1, 0), (1, 99), (24, 99), (1 << 20, 4), (1 << 20, 1 << 20)])
@pytest.mark.parametrize(("shape", "offset", "extent"), BOXES)
def test_a_box_read_from_disk_equals_torch_indexing(stored, monkeypatch, shape, offset, extent, span, gap):
    monkeypatch.setattr(boxes, "_SPAN_NBYTES", span)
    monkeypatch.setattr(boxes, "_GAP_NBYTES", gap)
    tensor, path = stored(shape)
    with path.open("rb") as file:
        found = read_box(file.fileno(), path, 3, torch.int32, shape, Box(offset, extent))
    assert torch.equal(found, _cut_out(tensor, Box(offset, extent)))


def test_a_file_that_ends_inside_the_box_is_named(stored):
    _, path = stored((4, 4))
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb") as file, pytest.raises(FormatError, match="1 bytes too early"):
        read_box(file.fileno(), path, 3, torch.int32, (4, 4), Box((2, 0), (2, 4)))


@pytest.mark.parametrize("max_numel", [1, 2, 7, 1000])
@pytest.mark.parametrize(("shape", "offset", "extent"), BOXES)
def test_cut_pieces_are_small_and_tile_the_box_in_order(shape, offset, extent, max_numel):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    box = Box(offset, extent)
    parts = list(box.cut(max_numel))
    assert all(part.numel <= max_numel for part in parts)
    assert torch.equal(torch.cat([_cut_out(tensor, part).reshape(-1) for part in parts]), _cut_out(tensor, box).reshape(-1))


def test_boxes_meet_where_both_hold_elements():
    assert Box((0, 2), (4, 4)).meet(Box((3, 0), (4, 3))) == Box((3, 2), (1, 1))
    assert Box((0, 0), (4, 4)).meet(Box((4, 0), (4, 4))) is None


def test_touching_boxes_do_not_overlap_but_sharing_ones_do():
    assert not overlaps([Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 2), (2, 2))])
    assert overlaps([Box((0, 0), (2, 4)), Box((1, 3), (1, 1))])
    assert overlaps([Box((), ()), Box((), ())])


def test_overlaps_agree_with_counting_elements():
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        numbers = torch.randint(0, 6, (4, 4), generator=generator).tolist()
        cut = [Box((a, b), (1 + c % 3, 1 + d % 3)) for a, b, c, d in numbers]
        counts = torch.zeros(9, 9)
        for box in cut:
            counts[box.offset[0] : box.offset[0] + box.shape[0], box.offset[1] : box.offset[1] + box.shape[1]] += 1
        assert overlaps(cut) == bool((counts > 1).any())
