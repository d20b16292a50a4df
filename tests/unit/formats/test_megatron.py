"""Megatron's legacy rank files, incomplete, contradictory or hostile: each is refused by its cause, with the ranks by coordinate."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reports.errors import FormatError, HostilePickleError, ReplicaError
from tasks.engine.families.families import find_family
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing.replicas import check_copies, check_replicas
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.megatron import Grid, Model, config, edit_rank, write_legacy

DENSE, EXPERTS = Model(), Model(experts=4)


def _refusal(folder: Path) -> str:
    with pytest.raises(FormatError) as refused:
        open_checkpoint(folder).catalog()
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "grid", "lost", "said"),
    [
        (DENSE, Grid(tp=2, pp=2), "mp_rank_01_000", "no file of tp=1, pp=0, and with it part 1 of 2 of that stage's weights"),
        (DENSE, Grid(tp=2, pp=2), "mp_rank_00_001", "no file of tp=0, pp=1"),
        (DENSE, Grid(pp=3, stages=((1, 2, 1),)), "mp_rank_00_001", "no file of pp=1, and with it that whole pipeline stage"),
        (EXPERTS, Grid(ep=2), "mp_rank_00_001", "no file of ep=1, pp=0, and with it experts 2-3"),
        (EXPERTS, Grid(tp=2, ep=2), "mp_rank_01_001", "no file of expert-tp=1, ep=1, pp=0, and with it experts 2-3"),
        (EXPERTS, Grid(tp=2, pp=2, ep=2), "mp_rank_00_001_001", "no file of expert-tp=0, ep=1, pp=1, and with it experts 2-3"),
    ],
)
def test_a_lost_rank_is_named_with_what_is_lost(model, grid, lost, said, tmp_path):
    write_legacy(tmp_path, model, grid, leave_out=(lost,))
    assert said in _refusal(tmp_path)


def test_a_lost_rank_of_a_sparse_grid_is_a_lost_share_of_the_dense_weights(tmp_path):
    write_legacy(tmp_path, EXPERTS, Grid(tp=2, ep=2, etp=1), leave_out=("mp_rank_01_001",))
    assert "no file of tp=1, pp=0" in _refusal(tmp_path)


def test_a_sparse_grid_is_whole(tmp_path):
    write_legacy(tmp_path, EXPERTS, Grid(tp=2, ep=2, etp=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mp_rank_00_000", "mp_rank_01_001"]
    assert open_checkpoint(tmp_path).catalog().tensors


def _args(**changed: object) -> Callable[[dict], object]:
    return lambda held: vars(held["args"]).update(changed)


def _set(key: str, value: object) -> Callable[[dict], object]:
    return lambda held: held.__setitem__(key, value)


def _rename(old: str, new: str) -> Callable[[dict], object]:
    return lambda held: held["model"].__setitem__(new, held["model"].pop(old))


def _drop(*names: str) -> Callable[[dict], object]:
    return lambda held: [held["model"].pop(name) for name in names]


LAYER_1 = tuple(
    f"decoder.layers.1.{name}"
    for name in (
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv._extra_state",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    )
)
# what is changed in the file of (tp 1, pp 0), and what the refusal says
ONE_FILE = {
    "another iteration": (_set("iteration", 8), "of iterations 7, 8"),
    "another layout": (_args(tensor_model_parallel_size=4), "args differ: tp 2 and 4"),
    "no args": (lambda held: held.pop("args"), "has no args"),
    "old QKV order": (_set("checkpoint_version", 1.0), "checkpoint_version is 1.0"),
    "no model": (lambda held: held.pop("model"), "holds no model"),
    "before Megatron Core": (_set("model", {"language_model": {"encoder": {}}}), "before Megatron Core"),
    "a layer lost at the end": (_drop(*LAYER_1), "parts of two saves"),
    "gates lost": (_drop("decoder.layers.0.mlp.linear_fc2.weight"), "linear_fc2.weight is missing"),
    "an unknown sub-block": (
        _rename("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mixer.in_proj.weight"),
        "no rule says how",
    ),
    "zero-centred norms": (_args(layernorm_zero_centered_gamma=True), "stored minus one"),
    "interleaved rotary": (_args(rotary_interleaved=True), "rotary pairs"),
    "no count": (_args(pipeline_model_parallel_size="2"), "not a count"),
    "another dtype": (
        lambda held: held["model"].update({"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(8, 6, dtype=torch.bfloat16)}),
        "bfloat16 (8, 12) by mp_rank_01_000, float32 (8, 12) by mp_rank_00_000",
    ),
}


@pytest.mark.parametrize("case", ONE_FILE)
def test_a_file_that_does_not_fit_is_refused_by_its_cause(case, tmp_path):
    change, said = ONE_FILE[case]
    write_legacy(tmp_path, DENSE, Grid(tp=2, pp=2))
    edit_rank(tmp_path / "mp_rank_01_000", change)
    assert said in _refusal(tmp_path)


def test_layers_that_do_not_add_up_to_args_are_counted_per_stage(tmp_path):
    write_legacy(tmp_path, DENSE, Grid(pp=2, args={"num_layers": 6}))
    assert "the stages hold 4 layers (pp=0: 2, pp=1: 2), args say num_layers=6" in _refusal(tmp_path)


def test_fewer_experts_than_args_say_are_refused(tmp_path):
    write_legacy(tmp_path, EXPERTS, Grid(ep=2))
    edit_rank(tmp_path / "mp_rank_00_001", _drop(*(f"decoder.layers.2.mlp.experts.local_experts.1.linear_fc{n}.weight" for n in (1, 2))))
    assert "decoder.layers.2.mlp.experts holds experts [0] of this rank, args say it has 2" in _refusal(tmp_path)


def test_a_name_with_more_numbers_than_axes_is_refused(tmp_path):
    write_legacy(tmp_path, DENSE, Grid(pp=2))
    (tmp_path / "mp_rank_00_000").rename(tmp_path / "mp_rank_00")
    assert "mp_rank_00/ has 0 numbers behind the first, but args say pp=2, ep=1" in _refusal(tmp_path)


def test_files_of_a_larger_save_left_in_the_folder_are_refused(tmp_path):
    write_legacy(tmp_path, DENSE, Grid(tp=2))
    shutil.copytree(tmp_path / "mp_rank_01", tmp_path / "mp_rank_02")
    assert "is a save of tp=2, pp=1, ep=1, so mp_rank_02 are of another" in _refusal(tmp_path)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-100])])
def test_a_file_that_is_gone_or_cut_short_is_named(damage, tmp_path):
    write_legacy(tmp_path, DENSE, Grid(tp=2))
    damage(tmp_path / "mp_rank_01" / "model_optim_rng.pt")
    assert "mp_rank_01/model_optim_rng.pt" in _refusal(tmp_path)


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch ran",)


@pytest.mark.parametrize("key", ["args", "rng_state", "model"])
def test_a_pickle_that_asks_for_more_is_refused_by_name_and_not_run(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_legacy(tmp_path, DENSE, Grid())
    edit_rank(tmp_path / "mp_rank_00", _set(key, _Hostile()))
    with pytest.raises(HostilePickleError, match=r"posix\.system|nt\.system"):
        open_checkpoint(tmp_path).catalog()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model", "grid", "rank", "name"),
    [
        (DENSE, Grid(tp=2), "mp_rank_01", "decoder.layers.2.input_layernorm.weight"),
        (DENSE, Grid(tp=2), "mp_rank_01", "decoder.final_layernorm.weight"),
        (EXPERTS, Grid(ep=2), "mp_rank_00_001", "decoder.layers.0.self_attention.linear_qkv.weight"),
        (EXPERTS, Grid(tp=2, ep=1, etp=1), "mp_rank_01", "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"),
    ],
)
def test_copies_that_differ_between_ranks_are_refused_with_both_named(model, grid, rank, name, tmp_path):
    write_legacy(tmp_path, model, grid)
    edit_rank(tmp_path / rank, lambda held: held["model"][name].view(-1)[0:1].add_(1))
    reader = open_checkpoint(tmp_path)
    source = SourceBytes(reader, reader.catalog())
    with pytest.raises(ReplicaError, match=rf"^{name}: .*{rank}/.* and mp_rank_00"):
        check_copies(source)
    source.files.close()


EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_the_copy_of_the_embedding_that_a_prediction_stage_holds_must_be_equal(drift, tmp_path):
    truth = write_legacy(tmp_path, DENSE, Grid(tp=2, pp=2))
    for tp, rank in enumerate(("mp_rank_00_001", "mp_rank_01_001")):
        copy = truth[EMBEDDING].chunk(2)[tp] + drift * tp
        edit_rank(tmp_path / rank, lambda held, copy=copy: held["model"].update({EMBEDDING: copy.clone()}))
    reader = open_checkpoint(tmp_path)
    source = SourceBytes(reader, reader.catalog())
    assert [r.locator.path.split("/")[0] for r in reader.catalog().replicas if r.fqn == EMBEDDING] == ["mp_rank_00_001", "mp_rank_01_001"]
    if drift:
        with pytest.raises(ReplicaError, match=r"^embedding\.word_embeddings\.weight: .*mp_rank_01_001/.* and mp_rank_01_000"):
            check_copies(source)
    else:
        assert check_copies(source) > 0
    source.files.close()


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_the_tied_copy_on_the_last_stage_must_be_equal(drift, tmp_path):
    model = Model(tied=True)
    write_legacy(tmp_path, model, Grid(tp=2, pp=2))
    edit_rank(tmp_path / "mp_rank_01_001", lambda held: held["model"]["output_layer.weight"].add_(drift))
    reader = open_checkpoint(tmp_path)
    family = find_family(config(model))
    assert family is not None
    dims = family.dims(config(model))
    plan = make_plan(reader.catalog(), PlanRequest(family, dims, family.expectation(dims)))
    source = SourceBytes(reader, reader.catalog())
    assert [(alias.name, alias.of) for alias in plan.aliases] == [("output_layer.weight", EMBEDDING)]
    if drift:
        with pytest.raises(ReplicaError, match=r"^output_layer\.weight: row 8 differs from embedding\.word_embeddings\.weight"):
            check_replicas(plan, source)
    else:
        assert check_replicas(plan, source) > 0
    source.files.close()


def test_padding_of_the_vocabulary_is_left_out_and_said(tmp_path):
    write_legacy(tmp_path, DENSE, Grid(tp=2))
    family = find_family(config(DENSE))
    assert family is not None
    dims = family.dims(config(DENSE))
    plan = make_plan(open_checkpoint(tmp_path).catalog(), PlanRequest(family, dims, family.expectation(dims)))
    assert [drop.name for drop in plan.dropped] == [f"{EMBEDDING} rows 10-15", "output_layer.weight rows 10-15"]
    assert all("padding to 16 rows" in drop.because and drop.asked_by == "rule" for drop in plan.dropped)


def test_a_share_of_another_size_is_refused_with_both_ranks(tmp_path):
    write_legacy(tmp_path, DENSE, Grid(tp=2))
    edit_rank(tmp_path / "mp_rank_01", lambda held: held["model"].update({"output_layer.weight": torch.zeros(6, 8)}))
    assert "float32 (12, 8) by mp_rank_01, float32 (16, 8) by mp_rank_00" in _refusal(tmp_path)


def test_the_newest_complete_iteration_of_a_run_is_read(tmp_path):
    write_legacy(tmp_path / "iter_0000007", DENSE, Grid(tp=2))
    write_legacy(tmp_path / "iter_0000009", DENSE, Grid(tp=2), step=9, leave_out=("mp_rank_01",))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.step == 7
    assert "iter_0000009 passed over" in catalog.notes[0]


def test_a_save_that_the_tracker_does_not_name_yet_is_noted(tmp_path):
    write_legacy(tmp_path / "iter_0000007", DENSE, Grid())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert "names iteration 5, this is 7" in open_checkpoint(tmp_path).catalog().notes[0]


def test_a_converted_checkpoint_lies_in_release(tmp_path):
    truth = write_legacy(tmp_path / "release", DENSE, Grid(tp=2), step=0)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert set(open_checkpoint(tmp_path).catalog().tensors) == set(truth)


def test_ranks_on_node_local_disks_are_found(tmp_path):
    truth = write_legacy(tmp_path / "main", DENSE, Grid(tp=2, pp=2))
    (tmp_path / "also").mkdir()
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        (tmp_path / "main" / name).rename(tmp_path / "also" / name)
    assert "no file of pp=1" in _refusal(tmp_path / "main")
    assert set(open_checkpoint(tmp_path / "main", also=[tmp_path / "also"]).catalog().tensors) == set(truth)


def test_counters_of_the_run_are_listed(tmp_path):
    write_legacy(tmp_path, DENSE, Grid(tp=2))
    state = {item.fqn: item.value for item in open_checkpoint(tmp_path).catalog().state}
    assert state["iteration"] == 7
    assert state["args.consumed_train_samples"] == 40
    assert state["opt_param_scheduler.num_steps"] == 40
    assert "mp_rank_01.rng_state" in state
