"""The second path on every layout that a format's own writer makes and the engine reads: an independent decoder, the same truth."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.witnesses.second_path import SecondPath
from tasks.witnesses.sources import DECODERS
from tests.builders.plans import whole, write_plan
from tests.contract.test_readers import BUILT, FILES

HEARD = [(reader.name, layout) for reader, layout in FILES if reader.name != "fsdp1_ranks"]  # that one says why it is not heard


def _gather(witness: SecondPath, name: str) -> torch.Tensor:
    pieces = list(witness.pieces(name, 50))
    out = torch.zeros(witness.targets[name].shape, dtype=pieces[0].values.dtype)
    for piece in pieces:
        out[tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.shape, strict=True))] = piece.values
    return out


def _root(folder: Path) -> Path:
    inner = sorted(folder.glob("*step*"))
    return inner[0] if inner else folder


@pytest.mark.parametrize(("source_format", "layout"), HEARD, ids=["-".join(row) for row in HEARD])
def test_every_live_tensor_is_derived_again(source_format, layout, written, tmp_path):
    build = dict(BUILT.get(source_format, ())).get(layout)
    if build is None:
        folder, truth = written / layout / "ckpt", load_file(written / layout / "truth.safetensors")
    else:
        folder = tmp_path / layout
        folder.mkdir()
        truth = build(folder)
    targets = [whole(name, tuple(value.shape), "F32") for name, value in truth.items()]
    witness = SecondPath(write_plan(tmp_path / "plan.json", source_format, folder, targets), (_root(folder),))
    for name, value in truth.items():
        found = _gather(witness, name)
        assert found.dtype == value.dtype
        assert torch.equal(found, value), name


def test_files_on_node_local_disks_are_found(written, tmp_path):
    truth = load_file(written / "fsdp2" / "truth.safetensors")
    main, also = tmp_path / "main", tmp_path / "also"
    for folder in (main, also):
        folder.mkdir()
    for file in (written / "fsdp2" / "ckpt").iterdir():
        target = also if file.name.startswith("__3_") else main
        (target / file.name).write_bytes(file.read_bytes())
    targets = [whole(name, tuple(value.shape), "F32") for name, value in truth.items()]
    witness = SecondPath(write_plan(tmp_path / "plan.json", "dcp", main, targets), (main, also))
    assert all(torch.equal(_gather(witness, name), value) for name, value in truth.items())


def test_every_format_the_engine_reads_has_a_decoder_or_a_reason():
    assert {reader.name for reader, _ in FILES} <= DECODERS.keys()
