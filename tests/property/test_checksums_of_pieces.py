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
    pieces = [CrcPiece(FILE, 64 + a, b - a, zlib.crc32(content[a:b])) for a, b in itertools.pairwise(cuts)]
    return content, draw(st.permutations(pieces))


def _recorded(content: bytes, crc32: int) -> list[RecordedCrc]:
    before, behind = RecordedCrc("others", FILE, 0, 64, 1), RecordedCrc("others", FILE, 64 + len(content), 9, 1)
    return [before, RecordedCrc("the values of w", FILE, 64, len(content), crc32), behind, RecordedCrc("others", "/ckpt/a", 64, 9, 1)]


@given(pieces_of())
def test_pieces_in_any_order_prove_the_whole(drawn):
    content, pieces = drawn
    assert verify_pieces(_recorded(content, zlib.crc32(content)), pieces, None) == []


@given(pieces_of(), st.integers(0, 10**6))
def test_one_flipped_bit_in_one_piece_is_refused_naming_tensor_and_file(drawn, bit):
    content, pieces = drawn
    damaged = bytearray(content)
    damaged[bit // 8 % len(content)] ^= 1 << bit % 8
    seen = [CrcPiece(FILE, p.start, p.nbytes, zlib.crc32(damaged[p.start - 64 : p.start - 64 + p.nbytes])) for p in pieces]
    with pytest.raises(FormatError, match="values of w have CRC32") as refusal:
        verify_pieces(_recorded(content, zlib.crc32(content)), seen, None)
    assert FILE in str(refusal.value)


@given(pieces_of(), st.data())
def test_bytes_that_no_piece_covers_are_read_later_and_nothing_else_is(drawn, data):
    content, pieces = drawn
    lacking = list(pieces)
    gone = data.draw(st.sampled_from([piece for piece in pieces if piece.nbytes]))
    lacking = [piece for piece in pieces if piece is not gone]
    read = []

    def read_crc(path: str, start: int, nbytes: int) -> int:
        read.append((path, start, nbytes))
        return zlib.crc32(content[start - 64 : start - 64 + nbytes])

    assert verify_pieces(_recorded(content, zlib.crc32(content)), lacking, None) == sorted(lacking, key=lacking.index)
    assert verify_pieces(_recorded(content, zlib.crc32(content)), lacking, read_crc) == []
    assert read == ([(FILE, gone.start, gone.nbytes)] if lacking else [])
    if lacking:
        with pytest.raises(FormatError, match="CRC32"):
            verify_pieces(_recorded(content, zlib.crc32(content) ^ 1), lacking, read_crc)


@given(pieces_of(), st.data())
def test_pieces_read_twice_prove_the_whole_all_the_same(drawn, data):
    content, pieces = drawn
    twice = [*pieces, data.draw(st.sampled_from(pieces))]
    assert verify_pieces(_recorded(content, zlib.crc32(content)), twice, None) == []
