"""The header reader of GGUF files: it reads what the gguf package writes, and refuses each way a header can be wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest

from validators.gguf_file import coarsest_type, main_type, read_gguf

gguf = pytest.importorskip("gguf")


def _write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 50000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_int64("whole", -5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", ""])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.ones((3, 8), np.float16))
    writer.add_tensor("blocks", gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.add_tensor("nibbles", gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0), raw_dtype=2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_is_what_the_package_wrote(tmp_path):
    path = _write(tmp_path / "m.gguf")
    file, own = read_gguf(path, "m.gguf"), gguf.GGUFReader(path)
    assert file.nbytes == path.stat().st_size
    assert dict(file.metadata) == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.rope.freq_base": 50000.0,
        "tokenizer.ggml.add_bos_token": True,
        "whole": -5,
        "tokenizer.ggml.tokens": ("a", "ü", ""),
        "numbers": (1, 2, 3),
    }
    assert [(t.name, t.shape, t.type, t.nbytes) for t in file.tensors] == [
        ("vector", (5,), "F32", 20),
        ("matrix", (3, 8), "F16", 48),
        ("blocks", (2, 64), "Q8_0", 136),
        ("nibbles", (2, 64), "ggml type 2", -1),
    ]
    assert [t.start for t in file.tensors] == [t.data_offset for t in own.tensors]


@pytest.mark.parametrize(
    ("stored", "main", "coarsest"),
    [
        ([("F16", 64), ("Q8_0", 1)], "F16", "Q8_0"),
        ([("F16", 1), ("BF16", 8)], "BF16", "BF16"),
        ([("F32", 8), ("F16", 1)], "F32", "F16"),
        ([], "", ""),
    ],
)
def test_the_type_of_most_bytes_names_a_file_and_the_coarsest_says_how_exact_it_is(stored, main, coarsest, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("vector", np.arange(5000, dtype=np.float32))  # norms stay F32 in every file
    for number, (kind, rows) in enumerate(stored):
        of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"m{number}", gguf.quants.quantize(np.ones((rows, 32), np.float32), of), raw_dtype=of)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    file = read_gguf(tmp_path / "m.gguf", "m.gguf")
    assert (main_type(file), coarsest_type(file)) == (main, coarsest)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def _array_of_arrays(depth: int) -> bytes:
    return struct.pack("<I", 9) + b"".join(struct.pack("<IQ", 9, 1) for _ in range(depth)) + struct.pack("<IQ", 0, 0)


def _tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return _text("w") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "ends inside its header"),
        (_header(magic=b"GGML"), "does not begin with GGUF"),
        (_header(version=1), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version 50331648"),
        (_header(keys=1), "ends inside its header"),
        (_header(keys=1, rest=struct.pack("<Q", 2**60)), "1152921504606846976 bytes wanted"),
        (_header(keys=2, rest=2 * (_text("k") + struct.pack("<II", 4, 7))), "k stands in it twice"),
        (_header(keys=1, rest=_text("k") + struct.pack("<I", 99)), "a value of kind 99"),
        (_header(keys=1, rest=_text("k") + struct.pack("<IIQ", 9, 4, 2**50)), "an array of 1125899906842624 values"),
        (_header(keys=1, rest=_text("k") + _array_of_arrays(5)), "a value of kind 9"),
        (_header(keys=1, rest=_text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (_header(tensors=1, rest=_text("w") + struct.pack("<I", 9)), "w: 9 dims"),
        (_header(tensors=1, rest=_tensor(2**40, 2**40)), "larger than any file"),
        (_header(tensors=1, rest=_tensor(4, offset=2**60)), "larger than any file"),
        (_header(tensors=1, rest=_tensor(33, 2, kind=8)), "no whole blocks of Q8_0"),
        (_header(tensors=2**60), "ends inside its header"),
    ],
)
def test_each_way_a_header_can_be_wrong_is_refused_without_taking_memory(raw, word, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=word):
        read_gguf(path, "m.gguf")
