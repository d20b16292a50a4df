"""ZeRO saves written as universal checkpoints: what DeepSpeed's loader would find in the files, by torch alone."""

from pathlib import Path

import pytest
import torch

from flows.cli import _guarded, app
from flows.reshard_command import write_checkpoint
from reports.errors import FormatError, ReleaseError, RequestError
from tests.builders.hf import write_shards
from tests.builders.megatron import Model
from tests.builders.megatron_runs import write_hf
from tests.builders.universal import write_universal
from tests.builders.zero import SLOTS, Zero, example, write_zero
from tests.builders.zero_parallel import EXPERT, write_experts, write_tensor_parallel


def _load(path: Path) -> object:
    return torch.load(path, weights_only=True)


def _values(held: object, stage: int) -> torch.Tensor:
    # ZeRO-1 and -2 load a dict with the tensor in its shape, ZeRO-3 a flat tensor.
    if stage == 3:
        assert isinstance(held, torch.Tensor)
        assert held.ndim == 1
        return held
    assert isinstance(held, dict)
    assert held["cat_dim"] == 0
    return held["param"]


@pytest.mark.parametrize("int_steps", [False, True])
@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 2), (3, 1), (3, 4)])
def test_every_parameter_has_its_values_moments_and_step(tmp_path, stage, world, int_steps):
    save = example(stage, world, int_steps=int_steps)
    write_zero(tmp_path / "ckpt", save)
    made = write_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert (made / "latest_universal").read_text() == "global_step4_universal"
    zero = made / "global_step4_universal/zero"
    for name, master in save.masters.items():
        assert torch.equal(_values(_load(zero / name / "fp32.pt"), stage).reshape(master.shape), master)
        for slot in SLOTS:
            assert torch.equal(_values(_load(zero / name / f"{slot}.pt"), stage).reshape(master.shape), save.moment(slot, name))
        assert _load(zero / name / "step.pt") == 4
    frozen = save.frozen["adapter.weight"].to(save.dtype).float()
    assert torch.equal(_values(_load(zero / "adapter.weight/fp32.pt"), stage).reshape(3, 3), frozen)
    common = _load(zero / "optimizer_state.pt")
    assert isinstance(common, dict)
    assert (common["ds_version"], common["param_groups"][0]["lr"]) == ("0.19.8", 0.1)
    if stage == 3:
        assert common["optimizer_state_dict"]["state"][0]["step"] == 4


def test_the_model_states_are_copied_byte_for_byte(tmp_path):
    folder = write_zero(tmp_path / "ckpt", example(3, 2))
    made = write_checkpoint(tmp_path / "ckpt", tmp_path / "out") / "global_step4_universal"
    copied = [path for path in sorted(folder.iterdir()) if path.name.endswith("_model_states.pt")]
    assert len(copied) == 2
    assert all((made / path.name).read_bytes() == path.read_bytes() for path in copied)
    assert not list(made.glob("*optim_states.pt"))


def test_what_deepspeeds_own_tool_writes_is_written_alike(tmp_path):
    save = example(2, 2)
    write_zero(tmp_path / "ckpt", save)
    theirs = write_universal(tmp_path / "theirs", save) / "zero"
    ours = write_checkpoint(tmp_path / "ckpt", tmp_path / "out") / "global_step4_universal/zero"
    lacking = {path.relative_to(theirs) for path in theirs.rglob("*.pt")} - {path.relative_to(ours) for path in ours.rglob("*.pt")}
    assert {path.parts[0] for path in lacking} == {"scale", "count"}  # buffers, which the model states have


def test_experts_have_folders_of_their_own(tmp_path):
    experts = [torch.randn(3, 5) for _ in range(4)]
    write_experts(tmp_path / "ckpt", Zero({"embed.weight": torch.randn(7, 3)}, 2, 4), [{EXPERT: value} for value in experts], ep_degree=2)
    zero = write_checkpoint(tmp_path / "ckpt", tmp_path / "out") / "global_step4_universal/zero"
    for number, value in enumerate(experts):
        assert torch.equal(_values(_load(zero / EXPERT.format(number) / "fp32.pt"), 2), value)


def test_a_save_of_tensor_parallel_ranks_is_refused(tmp_path):
    ranks = [Zero({"norm.weight": torch.ones(3), "up.weight": torch.randn(4, 3)}) for _ in range(2)]
    write_tensor_parallel(tmp_path / "ckpt", ranks, {"tp_replicated_parameter_patterns": ["norm"]})
    with pytest.raises(ReleaseError, match="is of 2 tensor-parallel ranks"):
        write_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt"]


def test_a_damaged_master_is_found_and_nothing_is_left(tmp_path):
    save = example(2, 2)
    folder = write_zero(tmp_path / "ckpt", save)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    content[content.index(save.masters["layers.0.up.weight"].numpy().tobytes()[-8:])] ^= 1
    path.write_bytes(content)
    with pytest.raises(ReleaseError, match="CRC32"):
        write_checkpoint(tmp_path / "ckpt", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt"]


def test_what_cannot_be_written_is_refused(tmp_path):
    write_zero(tmp_path / "ckpt", example(2, 2))
    write_zero(tmp_path / "plain", Zero({"a": torch.ones(2)}, stage=0))
    write_shards(tmp_path / "hf")
    (tmp_path / "taken").mkdir()
    with pytest.raises(RequestError, match="exists already"):
        write_checkpoint(tmp_path / "ckpt", tmp_path / "taken")
    with pytest.raises(RequestError, match="lies inside the checkpoint"):
        write_checkpoint(tmp_path / "ckpt", tmp_path / "ckpt/universal")
    with pytest.raises(FormatError, match="is of format hf"):
        write_checkpoint(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(FormatError, match="no optimizer files"):
        write_checkpoint(tmp_path / "plain", tmp_path / "out")


def test_the_command_writes_ranks_and_refuses_options_of_the_other_format(tmp_path, capsys):
    hf = write_hf(tmp_path / "hf", Model(layers=2, hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20))
    arguments = ["reshard", str(hf), "--to", str(tmp_path / "ranks")]
    assert _command(*arguments, "--tp", "2") == 2
    assert "--tp: --format universal is not cut that way. Add --format megatron" in capsys.readouterr().err
    assert _command(*arguments, "--format", "megatron", "--tp", "2", "--drop", "x*") == 2
    assert "write NAME=REASON" in capsys.readouterr().err
    assert _command(*arguments, "--format", "megatron", "--tp", "2", "--drop", "lm_head.weight=not wanted") == 2
    assert "leaves out lm_head.weight, which ranks hold" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    assert _command(*arguments, "--format", "megatron", "--tp", "2", "--pp", "2") == 0
    assert "5 files" in capsys.readouterr().out
    assert len(list((tmp_path / "ranks/release").iterdir())) == 4


def test_a_model_without_megatrons_naming_is_refused(tmp_path):
    write_shards(tmp_path / "hf")
    assert _command("reshard", str(tmp_path / "hf"), "--to", str(tmp_path / "out"), "--format", "megatron", "--family", "none") == 2


def _command(*arguments: str) -> int:
    return _guarded(lambda: app(list(arguments), prog_name="shardwright", standalone_mode=False))
