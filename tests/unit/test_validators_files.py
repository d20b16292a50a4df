"""The files check on hand-made bytes: what it says, and of which file and tensor."""

import pytest

from tests.builders.headers import codes_of, write_bytes
from validators.expectation import Evidence
from validators.files import examine
from validators.release import open_release

METADATA = b'{"__metadata__":{"format":"pt"},'
TWO = METADATA + b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}'


def judge(folder, **fields):
    """Return what the check says of a folder."""
    return examine(Evidence(open_release(folder), **fields))


def test_two_tensors_back_to_back_are_sound(tmp_path):
    write_bytes(tmp_path / "model.safetensors", TWO, bytes(10))
    outcome = judge(tmp_path)
    assert (outcome.findings, outcome.examined) == ((), 1)
    assert outcome.measured == {"files": 1, "tensors": 2, "tensor_nbytes": 10}


@pytest.mark.parametrize(
    ("header", "values", "code", "where"),
    [
        (TWO, 9, "files.truncated", "model.safetensors"),
        (TWO, 11, "files.trailing-bytes", "model.safetensors"),
        (TWO.replace(b"[8,10]", b"[9,11]"), 11, "files.hole", "model.safetensors: b"),
        (TWO.replace(b"[8,10]", b"[7,9]"), 9, "files.overlap", "model.safetensors: b"),
        (TWO.replace(b"[2]", b"[3]"), 10, "files.size-mismatch", "model.safetensors: a"),
        (TWO.replace(b"BF16", b"F128"), 10, "files.unknown-dtype", "model.safetensors: b"),
        (TWO.replace(b'"pt"', b'"tf"'), 10, "files.no-format", "model.safetensors"),
        (b"[]", 0, "files.malformed", "model.safetensors"),
        (b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', 8, "files.malformed", "model.safetensors"),
        (b'{"a":{"dtype":"F32","shape":[2]}}', 8, "files.malformed", "model.safetensors"),
        (b"\xff\xfe", 0, "files.malformed", "model.safetensors"),
    ],
)
def test_each_way_a_file_is_wrong_names_its_place(header, values, code, where, tmp_path):
    write_bytes(tmp_path / "model.safetensors", header, bytes(values))
    (found,) = judge(tmp_path).findings
    assert (found.code, found.where) == (code, where)


def test_hole_between_tensors_is_found_whatever_the_order_of_the_header(tmp_path):
    header = METADATA + b'"z":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    write_bytes(tmp_path / "model.safetensors", header, bytes(6))
    assert codes_of(judge(tmp_path)) == ["files.hole"]


def test_single_file_under_another_name_needs_an_index(tmp_path):
    write_bytes(tmp_path / "model-00001-of-00001.safetensors", TWO, bytes(10))
    assert codes_of(judge(tmp_path)) == ["files.index-missing"]
