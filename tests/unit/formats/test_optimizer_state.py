"""Training-state tensors of DCP saves: each spelling of an optimizer's entries, read as torch wrote it."""

import pytest
import torch

from tasks.engine.formats.optimizer_state import find_slot
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.dcp import save_alone
from tests.contract.assembled import assemble, same_bytes

PARAMETERS = {"up.weight", "embed.weight", "w.step"}


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (("optim", "state", "up.weight", "exp_avg"), "exp_avg/up.weight"),
        (
            (
                "optimizer",
                "state.up.weight.exp_avg_sq",
            ),
            "exp_avg_sq/up.weight",
        ),
        (("optimizer", "0", "state", "up.weight", "step"), "step/up.weight"),
        (("optimizer_0", "state", "module.up.weight", "exp_avg"), "exp_avg/up.weight"),
        (("optim", "state._orig_mod.up.weight.exp_avg"), "exp_avg/up.weight"),
        (("app", "optim", "state", "up.weight", "exp_avg"), "exp_avg/up.weight"),
        (("optim", "state", "up.weight", "master_param"), "master/up.weight"),
        (("optim", "state", "up.weight", "preconditioner", "0"), "preconditioner.0/up.weight"),
        (("optim", "state.up.weight.preconditioner.0"), "preconditioner.0/up.weight"),
        (("optim", "state.w.step.step"), "step/w.step"),
        (("optim", "state.fused.wqkv.weight.exp_avg"), "exp_avg/fused.wqkv.weight"),  # a name the model has not
        (("optim", "state", "0", "exp_avg"), None),  # integer ids name no parameter
        (("optim", "state.0.exp_avg"), None),
        (("optim", "param_groups", "0", "lr"), None),
        (("optim", "state"), None),
        (("train_state", "losses"), None),
    ],
)
def test_an_entry_names_its_slot_and_parameter(path, key):
    assert find_slot(path, PARAMETERS) == key


def _trained(*, flatten: bool) -> tuple[dict, dict]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    return model.state_dict(), state


@pytest.mark.parametrize("flatten", [False, True])
def test_moments_are_read_under_their_parameters_name_however_spelled(tmp_path, flatten):
    model, optim = _trained(flatten=flatten)
    _, nested = _trained(flatten=False)
    save_alone({"model": model, "optim": optim, "losses": torch.tensor([1.0, 2.0])}, tmp_path / "save")
    reader = open_checkpoint(tmp_path / "save")
    catalog = reader.catalog()
    slots = ("exp_avg", "exp_avg_sq", "step")
    assert set(catalog.state_tensors) == {f"{slot}/{name}" for slot in slots for name in model} | {"other/losses"}
    for name in model:
        for slot in slots:
            saved = nested["state"][name][slot]
            catalog.check_coverage(f"{slot}/{name}", saved.shape)
            assert same_bytes(assemble(reader, f"{slot}/{name}", saved.shape), saved)


def test_an_optimizers_folder_beside_the_models_is_read_with_it(tmp_path):
    model, optim = _trained(flatten=False)
    save_alone({"model": model}, tmp_path / "pytorch_model_fsdp_0")
    save_alone({"optimizer": optim}, tmp_path / "optimizer_0")
    reader = open_checkpoint(tmp_path)
    saved = optim["state"]["0.weight"]["exp_avg"]
    assert same_bytes(assemble(reader, "exp_avg/0.weight", saved.shape), saved)
    assert {place.path for item in reader.catalog().state for place in item.places} == {"optimizer_0/__0_0.distcp"}


def test_a_broken_optimizers_folder_leaves_the_model_readable_with_a_note(tmp_path):
    model, optim = _trained(flatten=False)
    save_alone({"model": model}, tmp_path / "pytorch_model_fsdp_0")
    save_alone({"optimizer": optim}, tmp_path / "optimizer_0")
    (tmp_path / "optimizer_0" / ".metadata").unlink()
    catalog = open_checkpoint(tmp_path).catalog()
    assert [item.fqn for item in catalog.state] == ["optimizer_0/"]
    assert not catalog.state_tensors
    assert "optimizer_0/ is not read, the model can be: " in catalog.notes[0]
    assert "incomplete save: .metadata is missing" in catalog.notes[0]


def test_two_optimizers_of_one_parameter_stay_apart(tmp_path):
    entry = {"state": {"w": {"exp_avg": torch.ones(2)}}}
    save_alone(
        {"model": {"w": torch.ones(2)}, "optimizers": {"a": entry, "b": entry}, "optim": entry, "optimizer": entry}, tmp_path / "save"
    )
    keys = set(open_checkpoint(tmp_path / "save").catalog().state_tensors)
    assert {"exp_avg/w", "other/optimizer.state.w.exp_avg"} <= keys
    assert len(keys) == 4


def test_where_an_object_lies_is_known(tmp_path):
    save_alone({"model": {"w": torch.ones(2)}, "lr_scheduler": {"last_epoch": 41}}, tmp_path / "save")
    (item,) = open_checkpoint(tmp_path / "save").catalog().state
    (place,) = item.places
    content = (tmp_path / "save" / place.path).read_bytes()[place.start : place.start + place.nbytes]
    assert (item.fqn, content[:2]) == ("lr_scheduler.last_epoch", b"PK")
