"""Safetensors headers, against the library's own writer, and one test per way a file can be malformed."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from reports.errors import FormatError
from tasks.engine.containers.safetensors_file import MAX_HEADER_BYTES, read_safetensors

TENSORS = {
    "b": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a": torch.ones(5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(7),
    "ümlaut": torch.zeros(2, dtype=torch.uint8),
}


def _file(header: object, nbytes: int, tmp_path: Path) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * nbytes)
    return str(path)


def _entry(start: int, stop: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_every_tensor_lies_where_the_library_wrote_it(tmp_path):
    path = tmp_path / "saved.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    found = read_safetensors(str(path))
    content = path.read_bytes()
    assert found.metadata == {"format": "pt"}
    assert set(found.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        values = found.tensors[name]
        assert values.shape == tuple(tensor.shape)
        expected = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert content[values.start : values.start + values.nbytes] == expected


MALFORMED = {
    "hole": ({"a": _entry(0, 8), "b": _entry(12, 20)}, 20, "hole"),
    "hole at the front": ({"a": _entry(4, 12)}, 12, "hole"),
    "overlap": ({"a": _entry(0, 8), "b": _entry(4, 12)}, 12, "overlap"),
    "cut short": ({"a": _entry(0, 8)}, 7, "cut short"),
    "bytes too many": ({"a": _entry(0, 8)}, 9, "bytes too many"),
    "length that does not fit the shape": ({"a": _entry(0, 8, (3,))}, 8, "takes 12 bytes"),
    "unknown dtype": ({"a": _entry(0, 8, dtype="F33")}, 8, "dtype F33"),
    "negative offset": ({"a": _entry(-8, 0)}, 0, "without a valid"),
    "offsets backwards": ({"a": _entry(8, 0)}, 8, "takes 8 bytes"),
    "negative shape": ({"a": _entry(0, 8, (-2,))}, 8, "without a valid"),
    "fractional shape": ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, 8, "without a valid"),
    "true as a length": ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1, "without a valid"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "without a valid"),
    "entry that is a list": ({"a": []}, 0, "not an object"),
    "header that is a list": ([], 0, "not a JSON object"),
    "header that is no JSON": (b"{'a'}", 0, "not valid JSON"),
    "header that is no text": (b"\xff\xfe{}", 0, "not valid JSON"),
    "header nested too deep": (b"[" * 100_000, 0, "not valid JSON"),
    "metadata that is no text": ({"__metadata__": {"format": 1}}, 0, "__metadata__"),
    "name twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        "twice",
    ),
}
LIBRARY_ACCEPTS = {"name twice", "true as a length"}  # the last of two entries wins there


@pytest.mark.parametrize(("header", "nbytes", "says"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused_saying_how(header, nbytes, says, tmp_path):
    with pytest.raises(FormatError, match=says):
        read_safetensors(_file(header, nbytes, tmp_path))


@pytest.mark.parametrize("way", [way for way in MALFORMED if way not in LIBRARY_ACCEPTS])
def test_the_library_refuses_it_too(way, tmp_path):
    header, nbytes, _ = MALFORMED[way]
    with pytest.raises(SafetensorError), safe_open(_file(header, nbytes, tmp_path), "pt"):
        pass


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 62, 9])
def test_a_header_longer_than_the_file_or_the_limit_is_refused(length, tmp_path):
    path = tmp_path / "made.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(FormatError, match=f"header of {length} bytes"):
        read_safetensors(str(path))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "made.safetensors").touch()
    with pytest.raises(FormatError, match="too short"):
        read_safetensors(str(tmp_path / "made.safetensors"))


def test_an_absent_file_is_refused_by_name(tmp_path):
    with pytest.raises(FormatError, match=r"absent\.safetensors: cannot be read: No such file"):
        read_safetensors(str(tmp_path / "absent.safetensors"))
