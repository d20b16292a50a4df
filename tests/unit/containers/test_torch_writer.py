"""Tensors written in pieces are what torch's own loader reads, mapped or not."""

import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.engine.containers.torch_writer import write_tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def _write(path, code, value, size, **options):
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    write_tensor(path, code, tuple(value.shape), (memoryview(raw[at : at + size]) for at in range(0, len(raw), size)), **options)


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 5), max_size=3), st.integers(1, 40), st.booleans())
def test_torch_loads_it(tmp_path_factory, code, shape, size, mapped):
    value, path = torch.randn(shape).to(DTYPES[code]), tmp_path_factory.mktemp("written") / "a.pt"
    _write(path, code, value, size)
    found = torch.load(path, weights_only=True, mmap=mapped)
    assert (found.dtype, found.shape, found.is_contiguous()) == (value.dtype, value.shape, True)
    assert torch.equal(found, value)


def test_a_dict_around_it_has_what_lies_beside(tmp_path):
    value = torch.randn(3, 2)
    _write(tmp_path / "a.pt", "F32", value, 5, key="param", cat_dim=0)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found.keys() == {"param", "cat_dim"}
    assert (found["cat_dim"], torch.equal(found["param"], value)) == (0, True)


def test_values_begin_where_torch_puts_them(tmp_path):
    _write(tmp_path / "a.pt", "F32", torch.randn(100), 64)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        info = archive.getinfo("archive/data/0")
    content = (tmp_path / "a.pt").read_bytes()
    name, extra = (int.from_bytes(content[info.header_offset + at : info.header_offset + at + 2], "little") for at in (26, 28))
    assert (info.header_offset + 30 + name + extra) % 64 == 0


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "a.pt").touch()
    with pytest.raises(FileExistsError):
        _write(tmp_path / "a.pt", "F32", torch.ones(2), 8)
