"""Reading byte ranges: exactly what was asked for, or a refusal that names the file."""

import os
from pathlib import Path

import pytest

from reports.errors import FormatError
from tasks.engine.containers.ranges import read_range, read_whole


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    path = tmp_path / "ten"
    path.write_bytes(b"0123456789")
    return path


@pytest.mark.parametrize(
    ("start", "nbytes", "expected"), [(0, 10, b"0123456789"), (3, 4, b"3456"), (9, 1, b"9"), (10, 0, b""), (4, 0, b"")]
)
def test_the_bytes_asked_for_are_returned(ten, start, nbytes, expected):
    assert read_range(ten, start, nbytes) == expected
    assert read_range(str(ten), start, nbytes) == expected


@pytest.mark.parametrize(("start", "nbytes"), [(0, 11), (10, 1), (50, 1)])
def test_a_file_that_ends_early_is_refused_with_its_size(ten, start, nbytes):
    with pytest.raises(FormatError, match=f"ten: file ends at byte 10, wanted {start + nbytes}"):
        read_range(ten, start, nbytes)


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 1), (0, -1)])
def test_a_negative_range_is_refused(ten, start, nbytes):
    with pytest.raises(FormatError, match="asks for"):
        read_range(ten, start, nbytes)


def test_an_absent_file_is_refused_by_name(tmp_path):
    with pytest.raises(FormatError, match="absent: cannot be read: No such file"):
        read_range(tmp_path / "absent", 0, 1)
    with pytest.raises(FormatError, match="absent: cannot be read: No such file"):
        read_whole(tmp_path / "absent")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(FormatError, match="cannot be read: Is a directory"):
        read_range(tmp_path, 0, 1)


def test_a_disk_that_fails_is_a_refusal(ten, monkeypatch):
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(FormatError, match="Input/output error"):
        read_range(ten, 0, 1)


def test_no_file_stays_open(ten):
    before = len(os.listdir("/proc/self/fd"))
    for nbytes in (1, 10, 11):
        try:
            read_range(ten, 0, nbytes)
        except FormatError:
            assert nbytes == 11
    assert len(os.listdir("/proc/self/fd")) == before
