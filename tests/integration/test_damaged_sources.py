"""Damaged and hostile checkpoints are refused naming what is wrong and where; nothing is left at the destination, nothing of them runs."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from flows.export import run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from reports.errors import CoverageError, FormatError, HostilePickleError, ReleaseError
from tests.builders.damage import Bomb, edit_metadata, flip, place_of, regions_of, replace_pickle
from tests.integration.line import beside, request_for

TENSOR = "model.embed.weight"  # fsdp2 layout; "embed.weight" in the release
REGIONS = (
    "first payload byte",
    "last payload byte",
    "local header magic",
    "local header name length",
    "local header extra length",
    "local header name",
    "pickle",
    "pickle start",
    "pickle end",
    "directory magic",
    "directory name",
    "directory crc",
    "directory size",
    "directory place",
    "end record magic",
    "end record count",
    "end record place",
)


@pytest.fixture
def folder(written, tmp_path):
    """A copy of an FSDP2 save on four ranks, to damage."""
    copy = tmp_path / "work" / "ckpt"
    shutil.copytree(written / "fsdp2/ckpt", copy)
    return copy


def export(source: Path, base: Path, **changed: object) -> Path:
    """Export as the command does; returns the destination."""
    base.mkdir(exist_ok=True)
    run_export(ExportRequest.model_validate(request_for(source, base, **changed)), PlainRunner(), Silent())
    return base / "out"


def refuse(source: Path, base: Path, kind: type[ReleaseError] = FormatError, **changed: object) -> str:
    """Export, which must be refused with nothing left; returns the message."""
    with pytest.raises(kind) as refusal:
        export(source, base, **changed)
    assert beside(base) == set()
    return str(refusal.value)


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_is_refused_naming_the_file(folder, tmp_path, region):
    path, start, nbytes = place_of(folder, TENSOR)
    item = path.read_bytes()[start : start + nbytes]
    places = regions_of(item)
    assert set(places) == set(REGIONS)
    flip(path, start + places[region])
    message = refuse(folder, tmp_path / "run")
    assert path.name in message
    if "payload" in region:
        assert "embed.weight" in message


@pytest.mark.slow
def test_any_flipped_bit_in_an_item_is_refused_or_leaves_the_values(folder, written, tmp_path):
    path, start, nbytes = place_of(folder, TENSOR)
    sound = path.read_bytes()
    truth = export(written / "fsdp2/ckpt", tmp_path / "sound")
    crashed = []
    for number, at in enumerate(range(0, nbytes, 17)):
        flip(path, start + at, number % 8)
        base = tmp_path / "run"
        try:
            out = export(folder, base)
        except ReleaseError as refusal:
            if path.name not in str(refusal):
                crashed.append((at, number % 8, str(refusal)))
        except Exception as crash:  # every crash is collected, so that one run shows all
            crashed.append((at, number % 8, repr(crash)))
        else:
            released = [p.name for p in truth.glob("*.safetensors") if p.read_bytes() != (out / p.name).read_bytes()]
            assert released == [], at
        path.write_bytes(sound)
        shutil.rmtree(base, ignore_errors=True)
    assert crashed == []


def test_a_truncated_file_is_refused_by_its_size(folder, tmp_path):
    path, _, _ = place_of(folder, TENSOR)
    os.truncate(path, path.stat().st_size - 1)
    assert path.name in refuse(folder, tmp_path / "run")


def test_an_empty_file_is_refused(folder, tmp_path):
    path, _, _ = place_of(folder, TENSOR)
    path.write_bytes(b"")
    assert path.name in refuse(folder, tmp_path / "run")


def test_a_missing_file_is_refused(folder, tmp_path):
    path, _, _ = place_of(folder, TENSOR)
    path.unlink()
    assert path.name in refuse(folder, tmp_path / "run")


def test_a_folder_in_place_of_a_file_is_refused(folder, tmp_path):
    path, _, _ = place_of(folder, TENSOR)
    path.unlink()
    path.mkdir()
    assert path.name in refuse(folder, tmp_path / "run")


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(folder, tmp_path):
    path, _, _ = place_of(folder, TENSOR)
    path.unlink()
    os.mkfifo(path)
    assert path.name in refuse(folder, tmp_path / "run")


def test_swapped_rank_files_are_refused(folder, tmp_path):
    one, other = folder / "__0_0.distcp", folder / "__3_0.distcp"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    message = refuse(folder, tmp_path / "run")
    assert "__0_0.distcp" in message or "__3_0.distcp" in message


def test_the_metadata_of_another_save_is_refused(folder, written, tmp_path):
    shutil.copyfile(written / "tp_fsdp/ckpt/.metadata", folder / ".metadata")
    assert ".distcp" in refuse(folder, tmp_path / "run")


def test_a_rank_file_of_another_save_with_other_shapes_is_refused(folder, written, tmp_path):
    shutil.copyfile(written / "tp_fsdp/ckpt/__1_0.distcp", folder / "__1_0.distcp")
    assert "__1_0.distcp" in refuse(folder, tmp_path / "run")


def test_a_hostile_metadata_is_named_and_never_runs(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    message = refuse(folder, tmp_path / "run", HostilePickleError)
    assert ".metadata" in message
    assert "mkdir" in message
    assert not (tmp_path / "ran").exists()


def test_a_bomb_deep_in_the_metadata_is_named_and_never_runs(folder, tmp_path):
    edit_metadata(folder, lambda metadata: metadata.planner_data.update(extra=Bomb(tmp_path / "ran")))
    assert "mkdir" in refuse(folder, tmp_path / "run", HostilePickleError)
    assert not (tmp_path / "ran").exists()


def test_a_hostile_item_is_named_and_never_runs(folder, tmp_path):
    path, start, nbytes = place_of(folder, TENSOR)
    content = path.read_bytes()
    hostile = replace_pickle(content[start : start + nbytes], Bomb(tmp_path / "ran"))
    path.write_bytes(content + hostile)
    moved = {}

    def move(metadata):
        index = next(i for i in metadata.storage_data if i.fqn == TENSOR)
        place = metadata.storage_data[index]
        assert path.name == place.relative_path
        place.offset, place.length = len(content), len(hostile)
        moved[index] = place

    edit_metadata(folder, move)
    message = refuse(folder, tmp_path / "run", HostilePickleError)
    assert path.name in message
    assert "mkdir" in message
    assert not (tmp_path / "ran").exists()
    assert moved


def test_a_hostile_training_state_item_is_never_opened(folder, written, tmp_path):
    path, start, nbytes = place_of(folder, "train_state.step")
    content = bytearray(path.read_bytes())
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    content[start : start + min(nbytes, len(bomb))] = bomb[:nbytes]
    path.write_bytes(content)
    export(folder, tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def _shift(metadata: object, fqn: str, rows: int) -> None:
    chunk = metadata.state_dict_metadata[fqn].chunks[1]
    old = next(i for i in metadata.storage_data if i.fqn == fqn and i.offset == chunk.offsets)
    place = metadata.storage_data.pop(old)
    chunk.offsets = torch.Size((chunk.offsets[0] + rows, *chunk.offsets[1:]))
    metadata.storage_data[type(old)(fqn, chunk.offsets, old.index)] = place


def test_overlapping_fragments_are_refused_naming_the_rows(folder, tmp_path):
    edit_metadata(folder, lambda metadata: _shift(metadata, TENSOR, -1))
    message = refuse(folder, tmp_path / "run", CoverageError)
    assert message.startswith("embed.weight: rows 24-24 of (99, 16) are in 2 shards")


def test_a_missing_fragment_is_refused_naming_the_rows(folder, tmp_path):
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata[TENSOR].chunks.pop(2))
    message = refuse(folder, tmp_path / "run", CoverageError)
    assert message.startswith("embed.weight: rows 50-74 of (99, 16) are in no shard")


def test_a_fragment_outside_its_tensor_is_refused(folder, tmp_path):
    def shrink(metadata):
        metadata.state_dict_metadata[TENSOR].size = torch.Size((98, 16))

    edit_metadata(folder, shrink)
    assert "lie outside shape (98, 16)" in refuse(folder, tmp_path / "run", CoverageError)


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/../../outside.distcp"])
def test_a_file_name_that_leaves_the_checkpoint_is_refused(folder, tmp_path, path):
    def leave(metadata):
        next(place for i, place in metadata.storage_data.items() if i.fqn == TENSOR).relative_path = path

    shutil.copyfile(folder / "__0_0.distcp", folder.parent / "outside.distcp")
    edit_metadata(folder, leave)
    assert "outside the checkpoint" in refuse(folder, tmp_path / "run")
