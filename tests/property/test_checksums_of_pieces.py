"""CRC32 of pieces against zlib's CRC32 of the joined bytes."""

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32_combine

from reports.errors import FormatError
from tasks.engine.writing.crc import CrcPiece, RecordedCrc, verify_pieces

FILE = "/ckpt/__1_0.distcp"


# Powers of x modulo the CRC-32 polynomial, by long division: what appending that many zero bytes does to a checksum of 0x80000000 (= x**0).
def test_checksums_combine_over_lengths_beyond_four_gib():
    polynomial = 0x104C11DB7
    for nbytes in (1, 300, 2**31, 2**32 + 5, 2**40 + 123):
        power, square, exponent = 1, 2, 8 * nbytes
        while exponent:
            if exponent & 1:
                power = multiply(power, square, polynomial)
            square, exponent = multiply(square, square, polynomial), exponent >> 1
        assert crc32_combine(0x80000000, 0, nbytes) == int(f"{power:032b}"[::-1], 2)


def multiply(left: int, right: int, modulus: int) -> int:
    """The product of two polynomials over GF(2), reduced."""
    product = 0
    for bit in range(32):
        product ^= (left << bit) if right >> bit & 1 else 0
    for bit in range(product.bit_length() - 1, 31, -1):
        product ^= (modulus << bit - 32) if product >> bit & 1 else 0
    return product


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
