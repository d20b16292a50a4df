"""Walking over a pickle's opcodes: sound pickles pass, and what would cost memory is found before anything is built."""

import pickle
import pickletools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.errors import FormatError
from tasks.engine.containers.pickle_scan import LENGTH_NBYTES, LINES, LONG_BINPUT, STOP, find_fault
from tasks.engine.containers.pickles import load_closed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers()),
)
REFUSED = {"EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}


@given(VALUES, st.integers(0, 5))
def test_every_pickle_of_plain_values_passes(value, protocol):
    assert find_fault(pickle.dumps(value, protocol=protocol)) == ""


@given(VALUES, st.integers(0, 5), st.data())
def test_every_pickle_cut_short_is_found(value, protocol, data):
    content = pickle.dumps(value, protocol=protocol)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    assert find_fault(cut)


def test_many_values_with_large_memo_indices_pass():
    for protocol in (0, 2, 4):
        assert find_fault(pickle.dumps([f"value {i}" for i in range(3000)], protocol=protocol)) == ""


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_every_opcode_of_python_is_walked_over_or_refused_on_purpose(opcode):
    code = opcode.code.encode("latin1")
    arguments = {
        "decimalnl_short": b"1\n",
        "decimalnl_long": b"1\n",
        "floatnl": b"1.0\n",
        "stringnl": b"'a'\n",
        "stringnl_noescape": b"a\n",
        "stringnl_noescape_pair": b"a\nb\n",
        "unicodestringnl": b"a\n",
    }
    if opcode.arg is None:
        argument = b""
    elif opcode.arg.name in arguments:
        argument = arguments[opcode.arg.name]
    elif opcode.arg.n > 0:
        argument = b"\0" * opcode.arg.n
    else:
        argument = b"\0" * LENGTH_NBYTES[code[0]] if code[0] in LENGTH_NBYTES else b"\0" * 8
    fault = find_fault(code + argument + b"." * 2)
    assert bool(fault) == (opcode.name in REFUSED), fault


def test_the_tables_name_no_opcode_twice():
    assert not LENGTH_NBYTES.keys() & LINES.keys()
    assert STOP not in LENGTH_NBYTES.keys() | LINES.keys()
    assert LONG_BINPUT not in LENGTH_NBYTES.keys() | LINES.keys()


@pytest.mark.parametrize(
    "content",
    [b"]r\xff\xff\xff\xff.", b"]r\x00\x00\x10\x00.", b"]p4294967295\n.", b"]p99999999999999999999\n.", b"]p-1\n."],
    ids=["2^32", "2^20", "2^32 as text", "beyond 64 bits", "negative"],
)
def test_a_memo_index_beyond_the_pickle_is_refused(content):
    with pytest.raises(FormatError, match="memo index"):
        load_closed(content, {}, where="a.pkl")


@pytest.mark.parametrize(
    "content",
    [b"X\xff\xff\xff\x7fabc.", b"B\xff\xff\xff\xffabc.", b"\x8e" + b"\xff" * 7 + b"\x7fabc.", b"\x8d" + b"\xff" * 8 + b"abc."],
    ids=["BINUNICODE", "BINBYTES", "BINBYTES8", "BINUNICODE8"],
)
def test_a_length_behind_the_end_is_refused(content):
    with pytest.raises(FormatError, match="needs bytes up to"):
        load_closed(content, {}, where="a.pkl")


def test_an_opcode_that_takes_a_buffer_is_refused():
    with pytest.raises(FormatError, match="0x96"):
        load_closed(b"\x80\x05\x96" + b"\xff" * 6 + b"\0\0.", {}, where="a.pkl")
