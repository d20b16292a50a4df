"""No weight file that the safetensors library refuses passes the files check, whatever was done to its header."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.builders.headers import write_bytes
from validators.expectation import Evidence
from validators.files import examine
from validators.release import open_release

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 24, 32, 40, -1, 2**63, 2**64, 2.0, 1e300, True, None, "4", [4]])
VALUES = NUMBERS | st.sampled_from(["F16", "F64", "BOOL", "f32", "", {}, []]) | st.lists(NUMBERS, max_size=3)
FIELDS = st.sampled_from(["dtype", "shape", "data_offsets", "extra", None])


def is_refused(path) -> bool:
    """Whether the library refuses the file."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                file.get_tensor(name)
    except (SafetensorError, ValueError, RuntimeError, OverflowError):
        return True
    return False


def assert_caught(folder, header: bytes, nbytes: int) -> None:
    """Assert that a refused file has a finding of severity error."""
    path = folder / "model.safetensors"
    write_bytes(path, header, bytes(nbytes))
    severities = {found.severity for found in examine(Evidence(open_release(folder))).findings}
    assert "error" in severities or not is_refused(path), header


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all examples; each overwrites its file."""
    return tmp_path_factory.mktemp("headers")


@given(
    edits=st.lists(st.tuples(st.sampled_from([*HEADER, "d"]), FIELDS, VALUES), min_size=1, max_size=2),
    nbytes=st.sampled_from([40, 41, 39, 0]),
)
def test_an_edited_field_that_the_library_refuses_is_caught(folder, edits, nbytes):
    header = json.loads(json.dumps(HEADER))
    for name, field, drawn in edits:
        value = copy.deepcopy(drawn)
        entry = header.get(name)
        if field is None or not isinstance(entry, dict):
            header[name] = value
        else:
            entry[field] = value
    assert_caught(folder, json.dumps(header).encode(), nbytes)


@given(at=st.integers(0, 400), new=st.binary(max_size=3), length=st.integers(0, 3))
def test_changed_bytes_that_the_library_refuses_are_caught(folder, at, new, length):
    header = json.dumps(HEADER).encode()
    at %= len(header)
    assert_caught(folder, header[:at] + new + header[at + length :], 40)
