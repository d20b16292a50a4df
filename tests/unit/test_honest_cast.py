"""The honest cast holds torch's own cast of the merged values, in the release's dtypes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from reports.errors import FormatError
from tasks import honest_cast
from tasks.honest_cast import write_honest_cast
from tests.builders.released import write_release


@pytest.mark.parametrize("piece_numel", [7, 1 << 20])
def test_each_tensor_is_cast_to_its_own_dtype_in_the_release(tmp_path, monkeypatch, piece_numel):
    monkeypatch.setattr(honest_cast, "_PIECE_NUMEL", piece_numel)
    merged = {"w": torch.randn(9, 5), "router": torch.randn(4), "scale": torch.tensor(2.5), "steps": torch.tensor([3, 4])}
    released = {"w": merged["w"].half() * 0, "router": merged["router"] * 0, "scale": merged["scale"].half(), "steps": merged["steps"]}
    write_release(tmp_path / "merged", merged)
    (tmp_path / "merged" / "config.json").write_text("{}")
    write_release(tmp_path / "release", released)
    folder = write_honest_cast(tmp_path / "merged", tmp_path / "release", tmp_path / "honest")
    found = load_file(folder / "model.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in released.items()}
    assert all(torch.equal(found[name], merged[name].to(released[name].dtype)) for name in merged)
    assert (folder / "config.json").read_text() == "{}"


def test_a_tensor_the_release_lacks_is_named(tmp_path):
    write_release(tmp_path / "merged", {"w": torch.ones(2)})
    (tmp_path / "release").mkdir()
    save_file({"v": torch.ones(2)}, tmp_path / "release" / "model.safetensors")
    with pytest.raises(FormatError, match="w: no dtype"):
        write_honest_cast(tmp_path / "merged", tmp_path / "release", tmp_path / "honest")
