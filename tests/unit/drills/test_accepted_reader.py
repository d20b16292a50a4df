"""Torch's own loader gets only what the closed list accepted: hostile metadata and objects are refused, and nothing of them runs."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reports.errors import HostilePickleError
from tasks.restoring.accepted import AcceptedReader
from tests.builders.dcp import save_alone


class Marks:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def _load(save: Path, state: dict) -> dict:
    dcp.load(state, storage_reader=AcceptedReader(save), no_dist=True)
    return state


def test_tensors_and_objects_come_back_as_torch_saved_them(tmp_path):
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "rng": pickle.dumps({"torch": torch.get_rng_state()}), "step": 3}
    save_alone(state, tmp_path / "save")
    found = _load(tmp_path / "save", {"model": {"w": torch.zeros(2, 3)}, "rng": b"", "step": 0})
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert (found["rng"], found["step"]) == (state["rng"], 3)


@pytest.mark.parametrize("wrap", [lambda value: value, pickle.dumps], ids=["an object", "bytes that are a pickle"])
def test_a_hostile_object_is_refused_and_does_not_run(tmp_path, wrap):
    save_alone({"model": {"w": torch.ones(2)}, "sched": {"a": wrap(Marks(tmp_path / "ran"))}}, tmp_path / "save")
    with pytest.raises(dcp.api.CheckpointException) as refused:
        _load(tmp_path / "save", {"model": {"w": torch.zeros(2)}, "sched": {"a": b""}})
    assert any(isinstance(wrapped[0], HostilePickleError) for wrapped in refused.value.failures.values())
    assert not (tmp_path / "ran").exists()


def test_what_is_not_asked_for_is_not_unpickled(tmp_path):
    save_alone({"model": {"w": torch.ones(2)}, "sched": {"a": Marks(tmp_path / "ran")}}, tmp_path / "save")
    assert torch.equal(_load(tmp_path / "save", {"model": {"w": torch.zeros(2)}})["model"]["w"], torch.ones(2))
    assert not (tmp_path / "ran").exists()


def test_hostile_metadata_is_refused_and_does_not_run(tmp_path):
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "save")
    (tmp_path / "save" / ".metadata").write_bytes(pickle.dumps(Marks(tmp_path / "ran")))
    with pytest.raises(HostilePickleError, match=r"posix\.mkdir"):
        AcceptedReader(tmp_path / "save")
    assert not (tmp_path / "ran").exists()


def test_metadata_changed_after_it_was_accepted_is_not_what_torch_sees(tmp_path):
    save_alone({"model": {"w": torch.ones(2)}}, tmp_path / "save")
    reader = AcceptedReader(tmp_path / "save")
    (tmp_path / "save" / ".metadata").write_bytes(pickle.dumps(Marks(tmp_path / "ran")))
    state = {"model": {"w": torch.zeros(2)}}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["model"]["w"], torch.ones(2))
    assert not (tmp_path / "ran").exists()
