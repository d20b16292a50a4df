"""Whatever happens to the bytes of a torch.save archive, it is refused or its values are the saved ones: no crash, no other values."""

import io

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reports.errors import FormatError
from tasks.engine.containers.torch_pickle import StoredTensor, describe, locate_tensor
from tasks.engine.containers.torch_zip import open_archive

TENSOR = torch.arange(200, dtype=torch.float32).reshape(20, 10)
_STREAM = io.BytesIO()
torch.save(TENSOR, _STREAM)
CONTENT = _STREAM.getvalue()
damage = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _read(content: bytes, path) -> bytes:
    # The values, as an export reads them: the description, the place, the recorded checksum.
    path.write_bytes(content)
    archive = open_archive(str(path), 0, len(content))
    tensor = describe(archive)
    if not isinstance(tensor, StoredTensor) or (tensor.dtype, tensor.shape) != ("float32", (20, 10)):
        raise FormatError("not the tensor expected")
    place = locate_tensor(archive, tensor, "F32")
    archive.verify(place.record)
    values = torch.frombuffer(bytearray(content[place.start : place.start + place.nbytes]), dtype=torch.float32)
    return values.as_strided(tensor.shape, place.strides or tensor.strides).contiguous().numpy().tobytes()


def test_the_sound_archive_is_read(tmp_path):
    assert _read(CONTENT, tmp_path / "a.pt") == TENSOR.numpy().tobytes()


@damage
@given(st.integers(0, len(CONTENT) - 1))
def test_an_archive_cut_anywhere_is_refused(tmp_path, length):
    with pytest.raises(FormatError):
        _read(CONTENT[:length], tmp_path / "a.pt")


@damage
@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_no_value(tmp_path, at, flip):
    content = bytearray(CONTENT)
    content[at] ^= flip
    try:
        values = _read(bytes(content), tmp_path / "a.pt")
    except FormatError:
        return
    assert values == TENSOR.numpy().tobytes()


@damage
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(tmp_path, content):
    with pytest.raises(FormatError):
        _read(content, tmp_path / "a.pt")


@damage
@given(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT)))
def test_bytes_left_out_in_the_middle_are_refused(tmp_path, start, stop):
    start, stop = sorted((start, stop))
    if start == stop:
        return
    with pytest.raises(FormatError):
        _read(CONTENT[:start] + CONTENT[stop:], tmp_path / "a.pt")
