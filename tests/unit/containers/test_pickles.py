"""The closed list: what it refuses, and that nothing of a hostile pickle runs."""

import io
import os
import pickle
import types

import pytest

from reports.errors import FormatError, HostilePickleError
from tasks.engine.containers.pickles import Allowed, Bag, Opaque, Record, load_closed
from tasks.engine.containers.torch_pickle import TENSOR_GLOBALS
from tasks.engine.formats.dcp_metadata import METADATA_GLOBALS
from tasks.engine.formats.distributed_pickles import PART_GLOBALS

LISTS: dict[str, Allowed] = {"tensors": TENSOR_GLOBALS, "metadata": METADATA_GLOBALS, "parts": PART_GLOBALS}


class Box(Record):
    """A stand-in of two fields."""

    __slots__ = ("left", "right")


class Hostile:
    """Pickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _box(state: object) -> bytes:
    # A pickle of m.Box with `state` as its BUILD state.
    return b"\x80\x04cm\nBox\n)\x81" + pickle.dumps(state, protocol=4)[2:-1] + b"b."


@pytest.mark.parametrize("allowed", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_is_refused_by_name_and_nothing_runs(allowed, protocol, tmp_path):
    content = pickle.dumps({"weight": Hostile(f"touch {tmp_path}/ran")}, protocol=protocol)
    with pytest.raises(HostilePickleError, match=r"(posix|nt)\.system"):
        load_closed(content, allowed, where="a.pkl")
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists()  # it was hostile


@pytest.mark.parametrize("allowed", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("name", ["eval", "exec", "__import__", "open", "setattr"])
def test_builtins_are_refused(allowed, name):
    with pytest.raises(HostilePickleError, match=name):
        load_closed(f"cbuiltins\n{name}\n.".encode(), allowed, where="a.pkl")


@pytest.mark.parametrize("attribute", ["__class__", "__init__", "api"])
def test_getattr_reaches_nothing_but_the_one_nested_class(attribute):
    content = b"cbuiltins\ngetattr\n(ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nV" + attribute.encode() + b"\ntR."
    with pytest.raises(FormatError, match="getattr"):
        load_closed(content, PART_GLOBALS, where="a.pkl")


@pytest.mark.parametrize("allowed", LISTS.values(), ids=LISTS)
def test_no_listed_global_is_a_function_or_a_class_a_pickle_could_change(allowed):
    for name, stand_in in allowed.items():
        assert not isinstance(stand_in, types.FunctionType), name
        if isinstance(stand_in, type) and stand_in is not tuple:
            assert callable(getattr(stand_in, "__setstate__", None)), name


@pytest.mark.parametrize("allowed", LISTS.values(), ids=LISTS)
def test_building_a_listed_class_itself_changes_nothing(allowed):
    for (module, name), stand_in in allowed.items():
        before = dict(vars(stand_in)) if isinstance(stand_in, type) else stand_in
        with pytest.raises(FormatError):
            load_closed(f"c{module}\n{name}\n(N(V__doc__\nVchanged\ndtb.".encode(), allowed, where="a.pkl")
        assert (dict(vars(stand_in)) if isinstance(stand_in, type) else stand_in) == before


def test_the_refusal_names_the_file():
    with pytest.raises(HostilePickleError) as refused:
        load_closed(b"cos\nsystem\n.", {}, where="folder/.metadata")
    assert str(refused.value).startswith("folder/.metadata: ")


@pytest.mark.parametrize("state", [{"left": 1, "right": 2}, (None, {"left": 1, "right": 2}), ({"left": 1}, {"right": 2})])
def test_a_record_takes_its_fields_from_every_form_of_state(state):
    box = load_closed(_box(state), {("m", "Box"): Box}, where="a.pkl")
    assert isinstance(box, Box)
    assert (box.left, box.right) == (1, 2)


@pytest.mark.parametrize("field", ["other", "__class__", "__setstate__"])
def test_a_field_the_record_does_not_know_is_refused(field):
    with pytest.raises(FormatError, match=field):
        load_closed(_box({field: 1}), {("m", "Box"): Box}, where="a.pkl")


def test_an_ordered_dict_keeps_entries_and_loses_attributes():
    content = b"\x80\x02ccollections\nOrderedDict\n)R(Va\nK\x01Vb\nK\x02u}V_metadata\nNsb."
    assert load_closed(content, {("collections", "OrderedDict"): Bag}, where="a.pkl") == {"a": 1, "b": 2}


def test_an_opaque_value_takes_any_arguments_and_state():
    content = b"\x80\x02cpathlib\nPosixPath\n(V/\nVx\ntR}Va\nK\x01sb."
    assert isinstance(load_closed(content, {("pathlib", "PosixPath"): Opaque}, where="a.pkl"), Opaque)


def test_references_to_objects_outside_the_pickle_are_refused_where_none_are_due():
    stream = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return "elsewhere" if value == 7 else None

    Pickler(stream).dump([7])
    with pytest.raises(FormatError, match="outside itself"):
        load_closed(stream.getvalue(), {}, where="a.pkl")


@pytest.mark.parametrize("length", range(0, 60, 3))
def test_a_pickle_cut_short_is_a_format_error(length):
    content = pickle.dumps({"a": [1, 2, (3, "four")], "b": {"c": b"bytes" * 5}}, protocol=4)
    with pytest.raises(FormatError):
        load_closed(content[:length], {}, where="a.pkl")


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\xff.", b"\x80\x04K", b"0.", b"h\x05.", b"\x8e" + b"\xff" * 8 + b"."])
def test_bytes_that_are_no_pickle_are_a_format_error(content):
    with pytest.raises(FormatError):
        load_closed(content, {}, where="a.pkl")
