"""Pickled training state, against what was pickled; nothing on the way may run."""

import datetime
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from reports.errors import FormatError, HostilePickleError
from tasks.engine.containers.state_pickle import Array, flatten_state, read_state
from tasks.engine.containers.torch_pickle import StoredTensor


def _read(path: Path) -> object:
    return read_state(str(path), 0, path.stat().st_size)


def _saved(value: object, tmp_path: Path) -> object:
    torch.save(value, tmp_path / "saved.bin")
    return _read(tmp_path / "saved.bin")


def _pickled(value: object, tmp_path: Path, protocol: int = 4) -> object:
    (tmp_path / "made.pkl").write_bytes(pickle.dumps(value, protocol=protocol))
    return _read(tmp_path / "made.pkl")


PLAIN = {"last_epoch": 3, "_last_lr": [3e-4, 1e-3], "lr_lambdas": [None], "name": "cosine", "done": False, "raw": b"\x00\x01"}


def test_plain_values_come_back_as_they_were(tmp_path):
    assert _saved(PLAIN, tmp_path) == PLAIN


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_pickled_by_the_trainer_are_opened(tmp_path, protocol):
    assert _pickled(PLAIN, tmp_path, protocol) == PLAIN


def test_bytes_that_are_a_pickle_are_opened_too(tmp_path):
    assert _saved({"dp_rank_0": pickle.dumps(PLAIN)}, tmp_path) == {"dp_rank_0": PLAIN}


def test_random_states_of_python_numpy_and_torch_are_read(tmp_path):
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    for found in (_saved(state, tmp_path), _saved(pickle.dumps(state), tmp_path), _pickled(state, tmp_path)):
        assert found["python"] == random.getstate()
        assert isinstance(found["numpy"][1], Array)
        assert isinstance(found["torch"], StoredTensor)
        assert found["torch"].shape == (5056,)


class _Marks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, pickle.dumps, lambda x: pickle.dumps({"a": pickle.dumps(x)})], ids=["plain", "once", "twice"]
)
def test_what_would_run_is_refused_at_every_depth_and_does_not_run(tmp_path, wrap):
    with pytest.raises(HostilePickleError, match=r"posix\.mkdir"):
        _saved({"rng": wrap(_Marks(tmp_path / "ran"))}, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_would_run_inside_a_pickled_tensor_is_refused(tmp_path):
    torch.save(_Marks(tmp_path / "ran"), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    hidden = (tmp_path / "old.pt").read_bytes()

    class Loads:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (hidden,)

    with pytest.raises(HostilePickleError, match=r"posix\.mkdir"):
        _saved(pickle.dumps(Loads()), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_global_outside_the_list_is_named(tmp_path):
    with pytest.raises(HostilePickleError, match=r"datetime\.datetime"):
        _saved({"time": datetime.datetime(2026, 1, 1)}, tmp_path)


def test_pickles_inside_pickles_have_an_end(tmp_path):
    value: object = 1
    for _ in range(9):
        value = pickle.dumps({"inside": value})
    with pytest.raises(FormatError, match="pickles inside pickles"):
        _saved(value, tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 40, -10])
def test_an_object_cut_short_is_refused(tmp_path, keep):
    torch.save(PLAIN, tmp_path / "saved.bin")
    content = (tmp_path / "saved.bin").read_bytes()
    (tmp_path / "saved.bin").write_bytes(content[:keep])
    with pytest.raises(FormatError):
        _read(tmp_path / "saved.bin")


def test_leaves_are_named_by_their_path():
    assert dict(flatten_state("s", {"a": [1, {"b": 2}], "empty": []})) == {"s.a.0": 1, "s.a.1.b": 2, "s.empty": []}
