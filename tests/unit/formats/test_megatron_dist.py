"""Megatron's torch_dist saves: both places of the common state, moments per parameter, and what is refused."""

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from reports.errors import CoverageError, FormatError, HostilePickleError
from tasks.engine.formats.megatron_dist import MegatronDistReader
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.megatron import Grid, Model, saved_bytes
from tests.builders.megatron_dist import SLOTS, write_torch_dist
from tests.contract.assembled import assemble, same_bytes

DENSE, EXPERTS = Model(), Model(experts=4)


def _refusal(folder: Path) -> str:
    with pytest.raises(FormatError) as refused:
        open_checkpoint(folder).catalog()
    return str(refused.value)


def _edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_a_save_without_its_last_file_is_told_by_its_entries(content, tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    (tmp_path / "metadata.json").unlink()
    if content is not None:
        (tmp_path / "metadata.json").write_text(content)
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.format == "megatron_dist"
    assert [note for note in catalog.notes if note.startswith("metadata.json is missing or damaged")]


@pytest.mark.parametrize(
    ("stored", "said"), [("plain", "by parameter"), ("fragments", "by parameter"), ("buckets", "dp_reshardable"), ("", "")]
)
def test_notes_say_at_which_layouts_megatron_resumes(stored, said, tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2, args={"transformer_impl": "local"}), optimizer=stored)
    notes = [note for note in open_checkpoint(tmp_path).catalog().notes if "Megatron resumes it" in note]
    assert [said in note for note in notes] == [True] * bool(said)


def _list_integrity(folder: Path, **changed: object) -> None:
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests} | changed))


def test_a_save_that_is_as_its_integrity_file_lists_it_is_read(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    _list_integrity(tmp_path)
    assert open_checkpoint(tmp_path).catalog().tensors
    _list_integrity(tmp_path, algorithm="blake3", files={".metadata": "00"})  # not known here
    assert open_checkpoint(tmp_path).catalog().tensors


def test_a_file_that_its_integrity_file_lists_otherwise_is_refused(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    _list_integrity(tmp_path)
    with (tmp_path / ".metadata").open("ab") as file:
        file.write(b"behind the pickle")
    assert "/.metadata: is not the file that integrity.json lists" in _refusal(tmp_path)


def test_a_listed_file_that_is_missing_is_named(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    _list_integrity(tmp_path, files={"__7_0.distcp": "00"})
    assert "lists __7_0.distcp, which this save lacks" in _refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', '{"files": {"a": 3}}', '{"files": {"../a": "00"}}'])
def test_an_integrity_file_that_makes_no_sense_is_refused(content, tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    (tmp_path / "integrity.json").write_text(content)
    assert "is no list of digests by file name" in _refusal(tmp_path)


@pytest.mark.parametrize("stored", ["plain", "fragments"])
@pytest.mark.parametrize(("model", "stacked"), [(DENSE, True), (EXPERTS, True), (EXPERTS, False)])
def test_masters_and_moments_are_found_per_layer_and_expert(model, stacked, stored, tmp_path):
    truth = write_torch_dist(tmp_path, model, Grid(tp=2), optimizer=stored, stacked=stacked)
    reader = open_checkpoint(tmp_path)
    words = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "param": "master"}
    assert set(reader.catalog().state_tensors) == {f"{word}/{name}" for word in words.values() for name in truth}
    for slot, factor in SLOTS.items():
        for name, value in truth.items():
            assert same_bytes(assemble(reader, f"{words[slot]}/{name}", tuple(value.shape)), value.float() * factor)


def test_moments_in_a_shape_of_their_own_belong_to_no_parameter(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(), optimizer="plain")
    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"

    def reshape(metadata: Metadata) -> None:
        item = metadata.state_dict_metadata[key]
        item.size = torch.Size([2, 4])
        item.chunks = [type(item.chunks[0])(torch.Size([0, 0]), torch.Size([2, 4]))]
        place = metadata.storage_data.pop(next(index for index in metadata.storage_data if index.fqn == key))
        metadata.storage_data[type(next(iter(metadata.storage_data)))(key, torch.Size([0, 0]))] = place

    _edit(tmp_path, reshape)
    assert f"other/{key}" in open_checkpoint(tmp_path).catalog().state_tensors


@pytest.mark.parametrize("common", ["entry", "file"])
def test_args_are_read_from_both_places(common, tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(), common=common)
    catalog = open_checkpoint(tmp_path).catalog()
    assert (catalog.step, catalog.stated["num_layers"], catalog.notes) == (7, 4, ())
    assert {item.fqn: item.value for item in catalog.state}["args.consumed_train_samples"] == 40


def test_a_save_without_args_is_read_and_noted(tmp_path):
    truth = write_torch_dist(tmp_path, DENSE, Grid(), common="file")
    (tmp_path / "common.pt").write_bytes(saved_bytes({"iteration": 3}))
    catalog = open_checkpoint(tmp_path).catalog()
    assert (catalog.step, set(catalog.tensors)) == (3, set(truth))
    assert "no args" in catalog.notes[0]


def test_extra_states_are_listed_together(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid())
    extra = [item for item in open_checkpoint(tmp_path).catalog().state if item.fqn.endswith("_extra_state")]
    assert [(item.fqn, len(item.places)) for item in extra] == [("decoder.layers.mlp.linear_fc1._extra_state", 4)]


def _unlink(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _drop_entry(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["common_state/shard_0_1"]


INCOMPLETE = {
    "a file of a rank": (_unlink("__1_0.distcp"), "rank 1 lost"),
    "no .metadata": (_unlink(".metadata"), "incomplete save: .metadata is missing"),
    "no common state": (lambda folder: _edit(folder, _drop_entry), "neither common.pt nor an entry common_state"),
    "a metadata cut short": (lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-50]), ".metadata"),
    "the zarr backend": (
        lambda folder: (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"})),
        "sharded backend 'zarr' is not read",
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_save_is_refused_by_its_cause(case, tmp_path):
    damage, said = INCOMPLETE[case]
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    damage(tmp_path)
    assert said in _refusal(tmp_path)


def test_stacked_layers_that_contradict_args_are_refused(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(args={"num_layers": 6}))
    assert "holds 4 layers, args say num_layers=6" in _refusal(tmp_path)


def test_a_chunk_that_no_rank_saved_is_a_hole_in_its_layer(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid(tp=2))
    key = "decoder.layers.mlp.linear_fc2.weight"

    def drop(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata[key].chunks
        chunks.remove(next(chunk for chunk in chunks if tuple(chunk.offsets) == (2, 0, 6)))

    _edit(tmp_path, drop)
    catalog = open_checkpoint(tmp_path).catalog()
    catalog.check_coverage("decoder.layers.1.mlp.linear_fc2.weight", (8, 12))
    with pytest.raises(CoverageError, match=r"decoder\.layers\.2\.mlp\.linear_fc2\.weight: \[0:8, 6:12\]"):
        catalog.check_coverage("decoder.layers.2.mlp.linear_fc2.weight", (8, 12))


def test_an_item_that_is_not_what_the_metadata_says_is_refused(tmp_path):
    write_torch_dist(tmp_path, DENSE, Grid())
    key = "decoder.final_layernorm.weight"

    def swap(metadata: Metadata) -> None:
        places = {index.fqn: index for index in metadata.storage_data if index.fqn in (key, "embedding.word_embeddings.weight")}
        metadata.storage_data[places[key]] = metadata.storage_data[places["embedding.word_embeddings.weight"]]

    _edit(tmp_path, swap)
    reader = open_checkpoint(tmp_path)
    with pytest.raises(FormatError, match=r"the metadata says F32 \(8,\), the item float32 \(16, 8\)"):
        reader.payload(reader.catalog().fragments(key)[0])


def test_hostile_pickles_are_refused_by_name(tmp_path):
    write_torch_dist(tmp_path / "metadata", DENSE, Grid())
    (tmp_path / "metadata" / ".metadata").write_bytes(b"cposix\nsystem\n(Vtouch ran\ntR.")
    with pytest.raises(HostilePickleError, match=r"posix\.system"):
        open_checkpoint(tmp_path / "metadata").catalog()
    write_torch_dist(tmp_path / "common", DENSE, Grid(), common="file")

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, ("touch ran",)

    (tmp_path / "common" / "common.pt").write_bytes(saved_bytes({"args": Hostile()}))
    with pytest.raises(HostilePickleError, match="system"):
        open_checkpoint(tmp_path / "common").catalog()


def test_a_converted_checkpoint_lies_in_release(tmp_path):
    truth = write_torch_dist(tmp_path / "release", DENSE, Grid())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    reader = open_checkpoint(tmp_path)
    assert isinstance(reader, MegatronDistReader)
    for name, value in truth.items():
        assert same_bytes(assemble(reader, name, tuple(value.shape)), value)
