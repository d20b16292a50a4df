"""The witness's own reader of `.metadata`, on files that torch itself pickled."""

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from reports.errors import FormatError, HostilePickleError
from tasks.witnesses.dcp_metadata import DcpTensor, read_dcp_metadata
from tasks.witnesses.sources import model_name
from tests.builders.released import GOLDEN

# Megatron's have no planner data, which this decoder takes names from; its own decoder does without.
RECORDED = sorted(path for path in GOLDEN.rglob(".metadata") if not path.relative_to(GOLDEN).parts[0].startswith("megatron"))


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.relative_to(GOLDEN).parts[0])
def test_it_lists_what_plain_pickle_lists(path):
    with path.open("rb") as file:
        told: Metadata = pickle.load(file)
    found = {tensor.key: tensor for tensor in read_dcp_metadata(path.read_bytes())}
    listed = {key: entry for key, entry in told.state_dict_metadata.items() if hasattr(entry, "chunks")}
    assert found.keys() == listed.keys()
    for key, entry in listed.items():
        tensor = found[key]
        assert tensor.shape == tuple(entry.size)
        assert tensor.path == tuple(map(str, told.planner_data[key]))
        assert tensor.dtype == str(entry.properties.dtype).removeprefix("torch.")
        assert [(p.box.offset, p.box.shape) for p in tensor.places] == [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    places = {(i.fqn, tuple(i.offset)): v for i, v in told.storage_data.items() if i.offset is not None}
    for key, tensor in found.items():
        for place in tensor.places:
            info = places[key, place.box.offset]
            assert (place.path, place.start, place.nbytes) == (info.relative_path, info.offset, info.length)


def test_a_hostile_global_is_named_and_nothing_runs(tmp_path):
    content = pickle.dumps({"state_dict_metadata": _Touch(tmp_path / "ran")}, protocol=4)
    with pytest.raises(HostilePickleError, match=r"(posix|nt)\.system"):
        read_dcp_metadata(content)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_metadata_cut_short_is_refused(share):
    content = RECORDED[0].read_bytes()
    with pytest.raises(FormatError, match="not readable"):
        read_dcp_metadata(content[: int(len(content) * share)])


@pytest.mark.parametrize("value", [{}, [], None, 7, "text"])
def test_another_pickle_is_no_metadata(value):
    with pytest.raises(FormatError, match="does not hold a DCP Metadata"):
        read_dcp_metadata(pickle.dumps(value))


def test_a_chunk_without_a_place_is_named(tmp_path):
    _save({"model": {"weight": torch.ones(4, 2)}}, tmp_path)
    metadata = _load(tmp_path)
    metadata.storage_data.clear()
    with pytest.raises(FormatError, match=r"model\.weight.*no place"):
        read_dcp_metadata(pickle.dumps(metadata))


def test_bytes_behind_a_stream_transform_are_refused(tmp_path):
    _save({"model": {"weight": torch.ones(4, 2)}}, tmp_path)
    metadata = _load(tmp_path)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]
    with pytest.raises(FormatError, match=r"model\.weight.*stream transform"):
        read_dcp_metadata(pickle.dumps(metadata))


def test_a_metadata_without_planner_data_gives_whole_keys(tmp_path):
    _save({"model": {"weight": torch.ones(4, 2)}}, tmp_path)
    metadata = _load(tmp_path)
    metadata.planner_data = None
    assert [t.path for t in read_dcp_metadata(pickle.dumps(metadata))] == [("model.weight",)]


def _save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process saves alone
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def _load(folder) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd"])
def test_a_file_outside_the_checkpoint_is_refused(tmp_path, path):
    _save({"model": {"weight": torch.ones(4, 2)}}, tmp_path)
    metadata = _load(tmp_path)
    for info in metadata.storage_data.values():
        info.relative_path = path
    with pytest.raises(FormatError, match="outside the checkpoint"):
        read_dcp_metadata(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model", "model.embed.weight"), "model.embed.weight"),
        (("model.embed.weight",), "model.embed.weight"),
        (("app", "model", "embed.weight"), "embed.weight"),
        (("state", "state_dict", "embed", "weight"), "embed.weight"),
        (("model", "_orig_mod.layers.0._checkpoint_wrapped_module.w"), "layers.0.w"),
        (("module", "module.w"), "w"),
        (("optim", "state", "embed.weight", "exp_avg"), "optim.state.embed.weight.exp_avg"),
    ],
)
def test_a_tensor_is_called_as_in_its_model(path, name):
    assert model_name(DcpTensor(".".join(path), path, (1,), "float32", ())) == name
