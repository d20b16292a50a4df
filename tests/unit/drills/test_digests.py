"""A tensor's digest is that of its values in C order, whatever ranks, columns or rectangles it is stored in."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.restoring.digests import digest_entries
from tasks.engine.restoring.facts import gather_facts
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.dcp import save_alone

LAYOUTS = ("fsdp2", "hsdp", "tp_fsdp", "torchtitan", "accelerate", "fsdp1", "fsdp1_dtensors", "hsdp_dtensors", "tp_fsdp_dtensors", "dcp_hf")


def _read(folder: Path, workers: int = 2):
    reader = open_checkpoint(folder)
    source = SourceBytes(reader, reader.catalog())
    try:
        return digest_entries(source, list(gather_facts(reader).entries.values()), workers)
    finally:
        source.files.close()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digests_are_those_of_the_live_tensors(written, layout):
    entries, damage = _read(written / layout / "ckpt")
    assert damage == ()
    for name, tensor in load_file(written / layout / "truth.safetensors").items():
        assert (entries[name].digest, entries[name].is_zero) == (_digest(tensor), not tensor.any()), name


def test_the_number_of_workers_changes_nothing(written):
    assert _read(written / "tp_fsdp" / "ckpt", 1) == _read(written / "tp_fsdp" / "ckpt", 4)


def test_tensors_larger_than_a_chunk_and_stored_transposed_are_read_whole(tmp_path):
    large, turned = torch.randn(1500, 1000), torch.randn(1000, 1300).t()
    save_alone({"model": {"large": large, "turned": turned, "empty": torch.zeros(0, 3), "one": torch.tensor(2.0)}}, tmp_path / "save")
    entries, damage = _read(tmp_path / "save")
    assert damage == ()
    for name, tensor in {"large": large, "turned": turned, "empty": torch.zeros(0, 3), "one": torch.tensor(2.0)}.items():
        assert entries[name].digest == _digest(tensor)


def test_a_flipped_bit_is_damage_of_its_tensor_alone(tmp_path):
    one, other = torch.randn(50, 4), torch.randn(50, 4)
    save_alone({"model": {"one": one, "other": other}}, tmp_path / "save")
    path = tmp_path / "save" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(one.numpy().tobytes()) + 100] ^= 1
    path.write_bytes(content)
    entries, damage = _read(tmp_path / "save")
    assert [(found.key, "CRC32" in found.what) for found in damage] == [("one", True)]
    assert (entries["one"].digest, entries["other"].digest) == ("", _digest(other))


def test_a_flipped_bit_inside_an_object_is_damage(tmp_path):
    save_alone({"model": {"w": torch.ones(2)}, "train_state": {"note": "resumed-twice-from-here"}}, tmp_path / "save")
    path = tmp_path / "save" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(b"resumed-twice")] ^= 1
    path.write_bytes(content)
    _, damage = _read(tmp_path / "save")
    assert [found.key for found in damage] == ["train_state.note"]
