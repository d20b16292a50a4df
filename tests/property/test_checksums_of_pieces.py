"""CRC32 of pieces against zlib's CRC32 of the joined bytes."""

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import FormatError
from tasks.engine.writing.crc import CrcPiece, RecordedCrc, combine_crc32, verify_pieces

FILE = "/ckpt/__1_0.distcp"


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_combine_to_that_of_the_joined_bytes(first, second):
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@st.composite
def pieces_of(draw):
    content = draw(st.binary(min_size=1, max_size=200))
    cuts = sorted({0, len(content), *draw(st.lists(st.integers(0, len(content)), max_size=4))})
    pieces = [CrcPiece(7, a, b - a, zlib.crc32(content[a:b])) for a, b in itertools.pairwise(cuts)]
    return content, draw(st.permutations(pieces))


def _recorded(content: bytes, crc32: int) -> dict[int, RecordedCrc]:
    return {7: RecordedCrc("w", FILE, 64, len(content), crc32)}


@given(pieces_of())
def test_pieces_in_any_order_prove_the_whole(drawn):
    content, pieces = drawn
    assert verify_pieces(_recorded(content, zlib.crc32(content)), pieces, None) == []


@given(pieces_of(), st.integers(0, 10**6))
def test_one_flipped_bit_in_one_piece_is_refused_naming_tensor_and_file(drawn, bit):
    content, pieces = drawn
    damaged = bytearray(content)
    damaged[bit // 8 % len(content)] ^= 1 << bit % 8
    seen = [CrcPiece(p.fragment, p.start, p.nbytes, zlib.crc32(damaged[p.start : p.start + p.nbytes])) for p in pieces]
    with pytest.raises(FormatError, match="values of w have CRC32") as refusal:
        verify_pieces(_recorded(content, zlib.crc32(content)), seen, None)
    assert FILE in str(refusal.value)


@given(pieces_of(), st.data())
def test_pieces_with_a_gap_or_an_overlap_are_left_and_then_read_again(drawn, data):
    content, pieces = drawn
    lacking = list(pieces)
    changed = data.draw(st.sampled_from(lacking))
    lacking.remove(changed)
    if data.draw(st.booleans()):
        lacking += [changed, changed]
    assert verify_pieces(_recorded(content, zlib.crc32(content)), lacking, None) == lacking
    assert verify_pieces(_recorded(content, zlib.crc32(content)), lacking, lambda _: zlib.crc32(content)) == []
    if lacking:
        with pytest.raises(FormatError, match="CRC32"):
            verify_pieces(_recorded(content, zlib.crc32(content)), lacking, lambda _: zlib.crc32(content) ^ 1)
