"""DeepSpeed saves that are incomplete, contradictory or odd: one test per way. The sound ones are in tests/contract and tests/property."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError, HostilePickleError
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.damage import Bomb
from tests.builders.zero import Zero, deepspeed_classes, example, write_zero
from tests.contract.assembled import assemble, same_bytes

OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def _refusal(root: Path, **options: object) -> str:
    with pytest.raises(FormatError) as refused:
        open_checkpoint(root, **options).catalog()
    assert str(root) in str(refused.value)
    return str(refused.value)


def _edit(path: Path, edit: Callable[[dict[str, object]], object]) -> None:
    with deepspeed_classes():
        held = torch.load(path, weights_only=False)  # our own file
        edit(held)
        torch.save(held, path)


def _set(**values: object) -> Callable[[dict[str, object]], object]:
    return lambda held: held.update(values)


class TestRoots:
    def test_the_latest_save_is_read_and_another_by_its_tag(self, tmp_path):
        for step in (4, 10):
            write_zero(tmp_path, example(2, 2, steps=step, tag=f"global_step{step}"))
        latest, older = open_checkpoint(tmp_path), open_checkpoint(tmp_path, tag="global_step4")
        assert [reader.catalog().step for reader in (latest, older, open_checkpoint(tmp_path, step=4))] == [10, 4, 4]
        assert older.catalog().root == str(tmp_path / "global_step4")
        assert "save global_step10 of" in latest.catalog().notes[0]

    def test_a_save_itself_is_read(self, tmp_path):
        folder = write_zero(tmp_path, example(3, 2, tag="any name"))
        assert open_checkpoint(folder).catalog().step == 4
        assert "is the save any name, not global_step4" in _refusal(folder, tag="global_step4")

    def test_without_latest_no_save_is_guessed(self, tmp_path):
        write_zero(tmp_path, example(2, 2, tag="a"))
        write_zero(tmp_path, example(2, 2, tag="b"))
        (tmp_path / "latest").unlink()
        assert "no file 'latest' to say which save is the last; there are a, b" in _refusal(tmp_path)
        assert open_checkpoint(tmp_path, tag="a").catalog().step == 4

    def test_latest_that_points_nowhere_is_refused_with_the_saves_there_are(self, tmp_path):
        write_zero(tmp_path, example(2, 2))
        (tmp_path / "latest").write_text("global_step9\n")
        assert "latest points at 'global_step9', which is no save here; there are global_step4" in _refusal(tmp_path)

    def test_latest_that_leaves_the_root_is_refused(self, tmp_path):
        write_zero(tmp_path, example(2, 2))
        (tmp_path / "latest").write_text("../elsewhere")
        assert "which is no folder's name" in _refusal(tmp_path)

    def test_an_unknown_tag_is_refused_with_the_saves_there_are(self, tmp_path):
        write_zero(tmp_path, example(2, 2))
        assert "--tag asks for 'best', which is no save here; there are global_step4" in _refusal(tmp_path, tag="best")

    def test_a_trainers_folder_is_read_from_the_masters_not_the_weights_beside_them(self, tmp_path):
        save, folder = example(2, 2, tag="global_step5"), tmp_path / "run" / "checkpoint-5"
        write_zero(folder, save)
        torch.save({"embed.weight": torch.zeros(7, 3)}, folder / "pytorch_model.bin")
        (folder / "rng_state_0.pth").write_bytes(b"0")
        reader = open_checkpoint(tmp_path / "run", step=5)
        assert same_bytes(assemble(reader, "embed.weight", (7, 3)), save.masters["embed.weight"])
        assert any("Hugging Face weights beside the save were not read" in note for note in reader.catalog().notes)
        assert "rng_state_0.pth" in {item.fqn for item in reader.catalog().state}

    @pytest.mark.parametrize(("inner", "tag"), [("", "pytorch_model"), ("pytorch_model", "global_step4")])
    def test_accelerates_folder_is_read(self, tmp_path, inner, tag):
        save = example(3, 2, tag=tag)
        write_zero(tmp_path / inner, save)
        assert set(open_checkpoint(tmp_path).catalog().tensors) == set(save.truth)

    @pytest.mark.parametrize("below", ["", "global_step4"])
    def test_node_local_disks_are_read_together(self, tmp_path, below):
        main, node = tmp_path / "main", tmp_path / "node1"
        save = example(3, 3)
        write_zero(main, save)
        (node / below).mkdir(parents=True)
        for file in (main / "global_step4").glob("*zero_pp_rank_2_*"):
            shutil.move(file, node / below / file.name)
        assert "rank 2 lost" in _refusal(main)
        reader = open_checkpoint(main, also=[node])
        assert all(same_bytes(assemble(reader, name, tuple(value.shape)), value) for name, value in save.truth.items())


class TestRanks:
    @pytest.mark.parametrize(("stage", "lost"), [(2, (1, 3)), (3, (0,))])
    def test_missing_ranks_are_listed_by_number(self, tmp_path, stage, lost):
        folder = write_zero(tmp_path, example(stage, 4))
        for rank in lost:
            (folder / OPTIM.format(rank)).unlink()
        said = _refusal(tmp_path)
        assert f"{len(lost)} of 4 files are missing" in said
        assert f"{', '.join(map(str, lost))} lost" in said

    def test_files_of_a_larger_world_are_named(self, tmp_path):
        write_zero(tmp_path, example(2, 4))
        write_zero(tmp_path, example(2, 2))
        said = _refusal(tmp_path)
        assert "is a save of 2 ranks: " in said
        assert OPTIM.format(2) in said
        assert OPTIM.format(1) not in said

    def test_a_renamed_rank_is_named_beside_the_one_that_is_missing(self, tmp_path):
        folder = write_zero(tmp_path, example(2, 3))
        (folder / OPTIM.format(2)).rename(folder / OPTIM.format(7))
        assert f"a save of 3 ranks: {OPTIM.format(7)} of another, and {OPTIM.format(2)} missing" in _refusal(tmp_path)

    def test_model_states_of_two_steps_are_refused(self, tmp_path):
        folder = write_zero(tmp_path / "a", example(3, 2, steps=4))
        other = write_zero(tmp_path / "b", example(3, 2, steps=5))
        name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
        shutil.copy(other / name, folder / name)
        said = _refusal(tmp_path / "a")
        assert f"{name}: is of step 5, zero_pp_rank_0_mp_rank_00_model_states.pt of step 4: parts of two saves" in said

    def test_two_precisions_in_one_folder_are_refused(self, tmp_path):
        write_zero(tmp_path, example(2, 2))
        write_zero(tmp_path, example(2, 2, dtype=torch.float16))
        assert "are of the same rank: two saves in one folder" in _refusal(tmp_path)

    def test_two_stages_in_one_folder_are_refused(self, tmp_path):
        write_zero(tmp_path, example(2, 2))
        write_zero(tmp_path, example(3, 2))
        assert "model states of ZeRO-3 and of another stage" in _refusal(tmp_path)

    def test_ranks_of_two_steps_are_refused(self, tmp_path):
        folder = write_zero(tmp_path / "a", example(2, 3, steps=4))
        other = write_zero(tmp_path / "b", example(2, 3, steps=5))
        shutil.copy(other / OPTIM.format(1), folder / OPTIM.format(1))
        said = _refusal(tmp_path / "a")
        assert "another step count" in said
        assert OPTIM.format(1) in said

    @pytest.mark.parametrize(("numel", "says"), [(8, "by the map of this rank"), (9, "only the last may hold fewer")])
    def test_exchanged_ranks_contradict_the_lengths_or_the_writers_own_map(self, tmp_path, numel, says):
        folder = write_zero(tmp_path, Zero({"a.weight": torch.randn(numel), "b.weight": torch.randn(numel, 2)}))
        one, two, aside = folder / OPTIM.format(0), folder / OPTIM.format(1), folder / "aside"
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        assert says in _refusal(tmp_path)

    def test_model_states_alone_are_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(3, 2))
        for rank in (0, 1):
            (folder / OPTIM.format(rank)).unlink()
        assert "no optimizer file" in _refusal(tmp_path)

    def test_optimizer_files_alone_are_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(2, 2))
        (folder / "mp_rank_00_model_states.pt").unlink()
        assert "holds no model states" in _refusal(tmp_path)


class TestVectors:
    def test_a_parameter_order_that_the_ranks_maps_contradict_is_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(2, 2))
        _edit(
            folder / "mp_rank_00_model_states.pt",
            lambda held: held["param_shapes"].__setitem__(0, dict(reversed(held["param_shapes"][0].items()))),
        )
        said = _refusal(tmp_path)
        assert "by param_shapes, but at" in said
        assert OPTIM.format(0) in said

    def test_a_group_with_more_left_over_than_alignment_is_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(2, 2, old=True))
        _edit(folder / "mp_rank_00_model_states.pt", lambda held: held["param_shapes"][0].popitem())
        assert "15 elements are left over, padding of 2 ranks is less than 4" in _refusal(tmp_path)

    def test_a_group_that_is_too_short_is_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(2, 2, old=True))
        _edit(folder / "mp_rank_00_model_states.pt", lambda held: held["param_shapes"][1].update({"more": torch.Size([50])}))
        assert "its 2 ranks hold 8 of 58 elements" in _refusal(tmp_path)

    def test_a_sharded_vector_of_another_length_is_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(3, 2))
        _edit(folder / OPTIM.format(1), lambda held: held["optimizer_state_dict"]["fp32_flat_groups"].__setitem__(0, torch.zeros(5)))
        assert "rank 1 holds 5 elements, its parameters' pieces are 34" in _refusal(tmp_path)

    def test_groups_that_the_optimizer_has_not_are_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(2, 2))
        _edit(folder / "mp_rank_00_model_states.pt", lambda held: held["param_shapes"].pop())
        assert "hold 2 parameter groups, the model states list 1" in _refusal(tmp_path)


class TestModelStates:
    def test_placeholders_that_nothing_fills_are_refused(self, tmp_path):
        folder = write_zero(tmp_path, example(3, 2))
        for rank in (0, 1):
            _edit(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", _set(frozen_param_shapes=None, frozen_param_fragments=None))
        assert "1 parameters are placeholders without elements, and no file holds their values: adapter.weight" in _refusal(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("param_shapes", "none"), ("buffer_names", {"a": 1}), ("module", [1]), ("shared_params", ["x"]), ("global_steps", "4")],
    )
    def test_client_state_that_overwrites_the_engines_keys_is_named(self, tmp_path, key, value):
        write_zero(tmp_path, example(2, 2, client={key: value}))
        said = _refusal(tmp_path)
        assert f"{key} holds" in said
        assert "Client state given to save_checkpoint overwrites keys" in said

    def test_client_state_is_listed(self, tmp_path):
        write_zero(tmp_path, example(2, 2, client={"epoch": 3, "rng": torch.zeros(2)}))
        assert {"client_state.epoch", "client_state.rng"} <= {item.fqn for item in open_checkpoint(tmp_path).catalog().state}

    def test_a_wrong_tie_is_refused(self, tmp_path):
        write_zero(tmp_path, example(2, 2, client={"shared_params": {"head.weight": "norm.weight"}}))
        assert "shared_params says that head.weight is norm.weight, but their shapes are (7, 3) and (3,)" in _refusal(tmp_path)

    def test_a_tie_to_nothing_is_refused(self, tmp_path):
        write_zero(tmp_path, example(3, 2, client={"shared_params": {"head.weight": "gone"}}))
        assert "head.weight is gone, which the save does not hold" in _refusal(tmp_path)

    def test_tensor_parallel_saves_are_refused(self, tmp_path):
        write_zero(tmp_path, example(2, 2, client={"mp_world_size": 2}))
        shutil.copy(tmp_path / "global_step4/mp_rank_00_model_states.pt", tmp_path / "global_step4/mp_rank_01_model_states.pt")
        for rank in (0, 1):
            shutil.copy(
                tmp_path / "global_step4" / OPTIM.format(rank),
                tmp_path / "global_step4" / OPTIM.format(rank).replace("mp_rank_00", "mp_rank_01"),
            )
        assert "is of 2 tensor-parallel ranks" in _refusal(tmp_path)

    def test_state_left_on_nvme_is_refused(self, tmp_path):
        (write_zero(tmp_path, example(3, 2)) / "offloaded_tensors").mkdir()
        assert "NVMe swap files" in _refusal(tmp_path)


class TestPickles:
    def test_a_class_outside_the_closed_list_is_refused_by_name_and_not_run(self, tmp_path):
        write_zero(tmp_path, example(2, 2, client={"bomb": Bomb(tmp_path / "ran")}))
        with pytest.raises(HostilePickleError, match=r"posix\.mkdir"):
            open_checkpoint(tmp_path).catalog()
        assert not (tmp_path / "ran").exists()

    def test_what_trainers_add_is_let_pass_unread(self, tmp_path):
        import argparse

        import numpy

        state = {"args": argparse.Namespace(lr=1.0), "np_rng_state": numpy.random.default_rng(1).integers(0, 9, 5), "seen": {1, 2}}
        save = example(1, 2, client=state)
        write_zero(tmp_path, save)
        assert set(open_checkpoint(tmp_path).catalog().tensors) == set(save.truth)


def test_an_optimizers_vectors_that_are_cut_in_another_way_belong_to_no_parameter(tmp_path):
    save = example(2, 2)
    folder = write_zero(tmp_path, save)
    for rank in (0, 1):
        buffer = torch.arange(50.0 + rank)  # as Muon keeps the momentum of whole parameters
        _edit(
            folder / OPTIM.format(rank),
            lambda held, b=buffer: held["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(whole=b),
        )
    reader = open_checkpoint(tmp_path)
    assert "whole/embed.weight" not in reader.catalog().state_tensors
    assert torch.equal(assemble(reader, "other/whole.group0.rank1", (51,)), torch.arange(51.0))
    assert same_bytes(assemble(reader, "exp_avg/embed.weight", (7, 3)), save.moment("exp_avg", "embed.weight"))


def test_a_save_without_zero_is_read_from_its_weights(tmp_path):
    save = Zero({"a.weight": torch.randn(3, 2)}, stage=0)
    folder = write_zero(tmp_path, save)
    moments = {"state": {0: {"exp_avg": torch.ones(3, 2), "step": 4}}, "param_groups": []}
    _edit(folder / "mp_rank_00_model_states.pt", _set(optimizer=moments))
    reader = open_checkpoint(tmp_path)
    assert same_bytes(assemble(reader, "a.weight", (3, 2)), save.masters["a.weight"].to(torch.bfloat16))
    assert list(reader.catalog().state_tensors) == ["other/optimizer.state.0.exp_avg"]
