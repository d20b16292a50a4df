"""The directory of torch.save archives: against torch's own writer and Python's zipfile, and one test per way it can be wrong."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError
from tasks.engine.containers.torch_zip import Archive, open_archive

TENSOR = torch.arange(1000, dtype=torch.float32)


def _saved(value: object = TENSOR) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def without_crc32() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def _large() -> bytearray:
    # An archive whose end record says "see zip64", as those beyond 4 GiB do.
    content = bytearray(_saved())
    content[-14:-2] = b"\xff" * 12
    return content


def _open(content: bytes, tmp_path: Path, before: bytes = b"", behind: bytes = b"") -> Archive:
    path = tmp_path / "items.distcp"
    path.write_bytes(before + content + behind)
    return open_archive(str(path), len(before), len(content))


@pytest.mark.parametrize("before", [b"", b"x" * 41, _saved(torch.zeros(3))], ids=["whole file", "odd byte", "behind another archive"])
def test_records_are_those_that_zipfile_finds(before, tmp_path):
    content = _saved()
    archive = _open(content, tmp_path, before, b"behind")
    expected = zipfile.ZipFile(io.BytesIO(content))
    assert {name: (record.nbytes, record.crc32) for name, record in archive.records.items()} == {
        info.filename.partition("/")[2]: (info.file_size, info.CRC) for info in expected.infolist()
    }
    assert archive.read("data.pkl") == expected.read("archive/data.pkl")
    assert archive.read("data/0") == TENSOR.numpy().tobytes()


def test_values_begin_where_torch_says(tmp_path):
    path = tmp_path / "tensor.pt"
    torch.save(TENSOR, path)
    reader = torch._C.PyTorchFileReader(str(path))
    archive = open_archive(str(path), 0, path.stat().st_size)
    assert archive.locate("data/0") == reader.get_record_offset("data/0")


def test_a_directory_longer_than_the_tail_is_read_whole(tmp_path):
    archive = _open(_saved({f"t{i}": torch.full((3,), float(i)) for i in range(300)}), tmp_path, b"x" * 7)
    assert sum(name.startswith("data/") for name in archive.records) == 300
    assert archive.read("data/299") == torch.full((3,), 299.0).numpy().tobytes()


def test_an_archive_without_checksums_is_known_as_such(without_crc32, tmp_path):
    archive = _open(_saved(), tmp_path)
    assert not archive.has_crc32
    assert archive.read("data/0") == TENSOR.numpy().tobytes()
    archive.verify("data/0")


def test_a_plain_zip_without_zip64_records_is_read(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("archive/data.pkl", b"N.")
    assert _open(stream.getvalue(), tmp_path, b"before").read("data.pkl") == b"N."


def test_an_archive_with_its_directory_in_the_zip64_records_is_read(tmp_path):
    assert zipfile.ZipFile(io.BytesIO(_large())).testzip() is None  # a valid zip
    assert _open(bytes(_large()), tmp_path, b"before").records == _open(_saved(), tmp_path, b"before").records


def test_a_record_whose_sizes_continue_in_the_zip64_field_is_read(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made, made.open(zipfile.ZipInfo("archive/data.pkl"), "w", force_zip64=True) as record:
        record.write(b"N.")
    content = bytearray(stream.getvalue())
    at = content.rindex(b"PK\x01\x02")
    (name_nbytes,) = struct.unpack_from("<H", content, at + 28)
    extra = struct.pack("<HHQQ", 1, 16, 2, 2)
    content[at + 20 : at + 28] = b"\xff" * 8  # both sizes
    content[at + 30 : at + 32] = struct.pack("<H", len(extra))
    content[at + 46 + name_nbytes : at + 46 + name_nbytes] = extra
    end = content.rindex(b"PK\x05\x06")
    content[end + 12 : end + 16] = struct.pack("<L", end - at)
    assert zipfile.ZipFile(io.BytesIO(content)).read("archive/data.pkl") == b"N."  # a valid zip
    assert _open(bytes(content), tmp_path).record("data.pkl").nbytes == 2


def test_a_flipped_bit_in_a_record_is_found_by_its_checksum(tmp_path):
    content = bytearray(_saved())
    content[content.index(TENSOR.numpy().tobytes()) + 1234] ^= 1
    archive = _open(bytes(content), tmp_path)
    with pytest.raises(FormatError, match=r"data/0 has CRC32"):
        archive.read("data/0")
    with pytest.raises(FormatError, match=r"data/0 has CRC32"):
        archive.verify("data/0")


def test_a_long_record_is_verified_piece_by_piece(tmp_path):
    values = torch.arange(3 << 20, dtype=torch.int32)
    archive = _open(_saved(values), tmp_path)
    assert archive.record("data/0").crc32 == zlib.crc32(values.numpy())
    archive.verify("data/0")


def test_an_archive_cut_short_says_so(tmp_path):
    with pytest.raises(FormatError, match="no end record: cut short"):
        _open(_saved()[:-1], tmp_path)


def test_a_file_that_ends_before_the_archive_says_where(tmp_path):
    path = tmp_path / "a.distcp"
    path.write_bytes(_saved()[:3000])
    with pytest.raises(FormatError, match="ends at byte 3000"):
        open_archive(str(path), 0, len(_saved()))


def test_bytes_that_are_no_archive_say_so(tmp_path):
    with pytest.raises(FormatError, match=r"no torch\.save archive here"):
        _open(b"\0" * 500, tmp_path)


def test_too_few_bytes_say_so(tmp_path):
    with pytest.raises(FormatError, match="too short"):
        _open(b"PK", tmp_path)


def test_the_format_before_torch_1_6_is_named(tmp_path):
    stream = io.BytesIO()
    torch.save(TENSOR, stream, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"before 1\.6"):
        _open(stream.getvalue(), tmp_path)


def test_a_compressed_record_is_refused(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", b"N." * 100)
    with pytest.raises(FormatError, match="compressed or encrypted"):
        _open(stream.getvalue(), tmp_path)


def test_a_record_named_twice_is_refused(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("archive/data.pkl", b"N.")
        made.writestr("archive/data_pkl", b"N.")
    with pytest.raises(FormatError, match="occurs twice"):
        _open(stream.getvalue().replace(b"data_pkl", b"data.pkl"), tmp_path)


def test_a_directory_with_fewer_entries_than_promised_is_refused(tmp_path):
    content = _large()
    at = content.rindex(b"PK\x06\x06")
    struct.pack_into("<Q", content, at + 32, 9)
    with pytest.raises(FormatError, match="zip directory"):
        _open(bytes(content), tmp_path)


def test_a_local_header_of_another_record_is_refused(tmp_path):
    content = bytearray(_saved())
    at = content.index(b"archive/data/0")
    content[at : at + 14] = b"archive/data/1"
    archive = _open(bytes(content), tmp_path)
    with pytest.raises(FormatError, match="local header of record data/0"):
        archive.locate("data/0")


def test_a_record_that_reaches_into_the_directory_is_refused(tmp_path):
    content = bytearray(_saved())
    at = content.rindex(b"archive/data/0") - 46
    struct.pack_into("<2L", content, at + 20, 50_000, 50_000)
    with pytest.raises(FormatError, match="reaches into"):
        _open(bytes(content), tmp_path)


def test_a_directory_behind_its_end_is_refused(tmp_path):
    content = _large()
    at = content.rindex(b"PK\x06\x06")
    struct.pack_into("<Q", content, at + 48, 1 << 40)
    with pytest.raises(FormatError, match="zip directory"):
        _open(bytes(content), tmp_path)


def test_a_zip64_locator_that_points_nowhere_is_refused(tmp_path):
    content = _large()
    at = content.rindex(b"PK\x06\x07")
    struct.pack_into("<Q", content, at + 8, 1 << 40)
    with pytest.raises(FormatError, match="zip64"):
        _open(bytes(content), tmp_path)


def test_an_absent_record_is_named_with_those_there_are(tmp_path):
    with pytest.raises(FormatError, match=r"no record data/5; there are .*data\.pkl"):
        _open(_saved(), tmp_path).read("data/5")


def test_a_refusal_names_the_file_and_the_archives_place(tmp_path):
    with pytest.raises(FormatError) as refused:
        _open(b"\0" * 500, tmp_path, b"x" * 100)
    assert str(refused.value).startswith(f"{tmp_path}/items.distcp at byte 100: ")
