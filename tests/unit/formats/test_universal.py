"""Universal checkpoints: state by name, and one test per way one can be wrong. Sound weights are in tests/contract."""

import shutil
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.formats.universal import UniversalReader
from tasks.engine.formats.zero import ZeroReader
from tests.builders.universal import write_universal
from tests.builders.zero import SLOTS, example, write_zero
from tests.contract.assembled import assemble, same_bytes


def _refusal(root: Path, **options: str) -> str:
    with pytest.raises(FormatError) as refused:
        open_checkpoint(root, **options).catalog()
    assert str(root) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("int_steps", [False, True])
def test_moments_and_steps_are_found_by_name(tmp_path, stage, int_steps):
    save = example(stage, 2, int_steps=int_steps)
    write_universal(tmp_path, save)
    reader = open_checkpoint(tmp_path)
    for name, master in save.masters.items():
        for slot in SLOTS:
            assert same_bytes(assemble(reader, f"{slot}/{name}", tuple(master.shape)), save.moment(slot, name))
        if stage == 3 and int_steps:
            assert next(item.value for item in reader.catalog().state if item.fqn == f"step/{name}") == 4
        else:
            assert assemble(reader, f"step/{name}", ()) == 4


def test_buffers_keep_their_integers(tmp_path):
    write_universal(tmp_path, example(2, 2))
    assert open_checkpoint(tmp_path).catalog().tensors["count"].dtype == "I64"


def test_beside_the_ranks_own_save_it_is_read_by_its_tag(tmp_path):
    write_zero(tmp_path, example(2, 2))
    write_universal(tmp_path, example(2, 2))
    assert isinstance(open_checkpoint(tmp_path), ZeroReader)
    assert isinstance(open_checkpoint(tmp_path, tag="global_step4_universal"), UniversalReader)


def test_a_pointer_to_nothing_is_refused(tmp_path):
    write_universal(tmp_path, example(2, 2))
    (tmp_path / "latest_universal").write_text("gone")
    assert "latest_universal points at 'gone', which is no save here; there are global_step4_universal" in _refusal(tmp_path)


def test_a_parameter_without_a_folder_is_named(tmp_path):
    shutil.rmtree(write_universal(tmp_path, example(2, 2)) / "zero" / "embed.weight")
    assert "1 parameters have no folder under zero/: embed.weight" in _refusal(tmp_path)


def test_a_parameter_without_values_is_named(tmp_path):
    (write_universal(tmp_path, example(2, 2)) / "zero/embed.weight/fp32.pt").unlink()
    assert "zero/embed.weight/fp32.pt" in _refusal(tmp_path)


def test_flat_values_too_short_for_their_shape_are_refused(tmp_path):
    torch.save(torch.zeros(20), write_universal(tmp_path, example(3, 2)) / "zero/embed.weight/fp32.pt")
    assert "fp32 has 20 elements of shape (7, 3)" in _refusal(tmp_path)


def test_a_parameter_the_model_states_do_not_know_needs_a_shape(tmp_path):
    folder = write_universal(tmp_path, example(3, 2)) / "zero/more"
    folder.mkdir()
    torch.save(torch.zeros(20), folder / "fp32.pt")
    assert "more is flat, and the model states do not tell its shape" in _refusal(tmp_path)


def test_something_else_in_a_parameters_file_is_refused(tmp_path):
    torch.save(["a"], write_universal(tmp_path, example(2, 2)) / "zero/embed.weight/fp32.pt")
    assert "holds no tensor, but a list" in _refusal(tmp_path)


def test_missing_copies_of_the_model_states_are_refused(tmp_path):
    folder = write_universal(tmp_path, example(3, 3))
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "ranks are missing among" in _refusal(tmp_path)
    for path in folder.glob("*.pt"):
        path.unlink()
    assert "holds no copy of the model states" in _refusal(tmp_path)
