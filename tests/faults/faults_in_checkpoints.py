"""Planted faults of training runs: what is broken in a save, or around it, and the code by which a drill must say so."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.builders.saves import without_padding
from tests.builders.trainer import Run, write_run
from tests.builders.zero import SLOTS, Tensors, example, write_zero
from validators.drills.record import RECORD_NAME

State = dict


@dataclass(frozen=True)
class CheckpointFault:
    """One way a run's checkpoints are wrong. `plant` changes the run's root, after a first drill where `drilled_before`; `goals` are the
    owner's; `log` says whether the drill sees the trainer's log. `run` is a key of RUNS.
    """

    name: str
    code: str
    plant: Callable[[Path], None]
    goals: Mapping[str, object] = field(default_factory=dict)
    drilled_before: bool = False
    log: bool = False
    run: str = "fsdp"


def make_run(folder: Path) -> Path:
    """The sound run that most faults are planted into: saved at steps 3 and 6."""
    write_run(folder / "run")
    return folder / "run"


def make_zero_run(folder: Path) -> Path:
    """A sound run of DeepSpeed on three ranks, with a record of its one save."""
    from flows.recording import record_checkpoint

    write_zero(folder / "run", ZERO)
    record_checkpoint(folder / "run", (), None, replace=False, workers=1)
    (folder / "run.log.jsonl").touch()
    return folder / "run"


def recut(moments: Callable[[str], Tensors]) -> Callable[[Path], None]:
    """Return what cuts the save of a DeepSpeed run for two ranks, as a tool does that takes `moments` for those of a slot."""

    def plant(root: Path) -> None:
        kept = root / ZERO.tag / RECORD_NAME
        record = kept.read_bytes()
        shutil.rmtree(root)
        write_zero(root, replace(ZERO, world=2, moments={slot: moments(slot) for slot in SLOTS}))
        kept.write_bytes(record)

    return plant


# Sound runs, by name
RUNS: Mapping[str, Callable[[Path], Path]] = {"fsdp": make_run, "zero": make_zero_run}
ZERO = example(3, 3, tag="global_step4", dtype=torch.float32)


def leave(_: Path) -> None:
    """Plant nothing: the fault lies in what the owner wants."""


def load_state(save: Path) -> State:
    """Return everything a save holds, through torch's loader."""
    import torch.distributed.checkpoint as dcp

    state = Run(0, 1).state()
    dcp.load(state, checkpoint_id=save, no_dist=True)
    return state


def write_state(state: State, save: Path) -> None:
    """Replace a save."""
    import torch.distributed.checkpoint as dcp

    shutil.rmtree(save)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=save, no_dist=True)


def edit(change: Callable[[State], object], step: int = 6) -> Callable[[Path], None]:
    """Return what changes the state of one save."""

    def plant(root: Path) -> None:
        save = root / f"step-{step}"
        state = load_state(save)
        change(state)
        write_state(state, save)

    return plant


def in_save(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what changes the newest save's files."""
    return lambda root: (change(root / "step-6"), None)[1]


def _entries(state: State) -> dict[str, dict[str, torch.Tensor]]:
    return state["optim"]["state"]


def _each(state: State, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    for entry in _entries(state).values():
        change(entry)


def flip_bit(save: Path) -> None:
    """Change one value's last bit, and nothing around it."""
    values = load_state(save)["model"]["up.weight"].numpy().tobytes()
    path = save / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(values)] ^= 1
    path.write_bytes(content)


def record_then(change: Callable[[State], object]) -> Callable[[Path], None]:
    """Return what records the newest save, and changes it afterwards."""

    def plant(root: Path) -> None:
        from flows.recording import record_checkpoint

        path, _ = record_checkpoint(root, (), 6, replace=False, workers=1)
        kept = path.read_bytes()
        edit(change)(root)
        path.write_bytes(kept)

    return plant


def without(*names: str) -> Callable[[State], object]:
    """Return what drops parts of the state."""
    return lambda state: [state.pop(name) for name in names]


def unknown_step(root: Path) -> None:
    """Make the newest save a run of one under a name without a step, in a state without counters."""
    state = load_state(root / "step-6")
    kept = {"model": state["model"], "optim": {"state": {n: {"exp_avg": e["exp_avg"]} for n, e in _entries(state).items()}}}
    write_state(kept, root / "step-6")
    shutil.rmtree(root / "step-3")
    for path in (root / "step-6").iterdir():
        path.rename(root / path.name)
    (root / "step-6").rmdir()


def point_to_incomplete(root: Path) -> None:
    """As a trainer that moves its pointer before the save is durable."""
    (root / "step-6" / ".metadata").unlink()
    (root / "latest").write_text("step-6")


def flatten(state: State) -> None:
    """Spell the optimizer's groups by parameter."""
    groups = state["optim"].pop("param_groups")
    state["optim"]["param_groups"] = {name: {"lr": group["lr"]} for group in groups for name in group["params"]}


def to_fp16(state: State) -> None:
    state["model"] = {name: value.half() for name, value in state["model"].items()}


def swap_groups(state: State) -> None:
    state["optim"]["param_groups"][0]["params"].reverse()


def other_versions(root: Path) -> None:
    """As if the last drill had been made with another torch."""
    history = root.parent / "runs" / "drills.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    for row in rows:
        row["versions"]["torch"] = "1.0"
    history.write_text("".join(json.dumps(row) + "\n" for row in rows))


def age(root: Path) -> None:
    """Make the older save an hour older than the newest."""
    for path in (root / "step-3").iterdir():
        seconds = (root / "step-6" / ".metadata").stat().st_mtime - 3600
        os.utime(path, (seconds, seconds))


def other_writer(root: Path) -> None:
    """As if the trainer had been upgraded between two saves: the history knows the version that the save before recorded."""
    edit(lambda state: state["train_state"].update(torch_version="2.13"))(root)
    history = root.parent / "runs" / "drills.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    for row in rows:
        row["versions"]["writer's train_state.torch_version"] = "2.9"
    history.write_text("".join(json.dumps(row) + "\n" for row in rows))


FAULTS: tuple[CheckpointFault, ...] = (
    CheckpointFault("commit_marker_missing", "commit.uncommitted", in_save(lambda save: (save / ".metadata").unlink())),
    CheckpointFault("metadata_without_ranks", "commit.ranks-missing", in_save(lambda save: (save / "__0_0.distcp").unlink())),
    CheckpointFault("rank_file_truncated", "commit.cut-short", in_save(lambda save: os.truncate(save / "__0_0.distcp", 5000))),
    CheckpointFault(
        "save_over_a_save_interrupted", "commit.overwritten", in_save(lambda save: shutil.copy(save / ".metadata", save / ".metadata.tmp"))
    ),
    CheckpointFault("hostile_metadata", "commit.hostile", in_save(lambda save: (save / ".metadata").write_bytes(b"cos\nsystem\n."))),
    CheckpointFault("optimizer_without_model", "commit.unreadable", edit(without("model"))),
    CheckpointFault("bit_flipped", "commit.damaged", in_save(flip_bit)),
    CheckpointFault(
        "every_save_incomplete", "commit.none-complete", lambda root: [(root / f"step-{n}/.metadata").unlink() for n in (3, 6)]
    ),
    CheckpointFault("empty_rank_file_left", "commit.leftover", in_save(lambda save: (save / "__7_0.distcp").touch())),
    CheckpointFault("temporary_folder_left", "commit.leftover", lambda root: (root / "step-9.tmp").mkdir()),
    CheckpointFault("pointer_to_an_older_save", "commit.pointer-older", lambda root: (root / "latest").write_text("step-3")),
    CheckpointFault("model_only_save", "components.model-only", edit(without("optim"))),
    CheckpointFault("optimizer_lost", "components.optimizer-lost", edit(lambda state: state["optim"].update(state={}))),
    CheckpointFault("schedule_not_saved", "components.scheduler", unknown_step),
    CheckpointFault("random_numbers_not_saved", "components.random-numbers", edit(without("rng"))),
    CheckpointFault("data_position_lost", "components.data-position", unknown_step),
    CheckpointFault("data_position_not_saved", "components.data-derived", edit(without("dataloader"))),
    CheckpointFault("step_not_saved", "components.train-step", unknown_step),
    CheckpointFault("loss_scale_not_saved", "components.scaler", edit(to_fp16)),
    CheckpointFault("recorded_tensor_gone", "state.missing", record_then(lambda state: _entries(state).pop("up.bias"))),
    CheckpointFault("tensor_added_after_the_record", "state.unexpected", record_then(lambda state: state.update(extra=torch.ones(2)))),
    CheckpointFault(
        "moment_changed_after_the_record", "state.changed", record_then(lambda state: _entries(state)["up.bias"]["exp_avg"].add_(1e-6))
    ),
    CheckpointFault(
        "optimizer_steps_zero", "consistency.optimizer-restarted", edit(lambda state: _each(state, lambda entry: entry["step"].zero_()))
    ),
    CheckpointFault(
        "optimizer_one_step_behind", "consistency.optimizer-step", edit(lambda state: _each(state, lambda entry: entry["step"].sub_(1)))
    ),
    CheckpointFault(
        "schedule_saved_fresh", "consistency.scheduler-restarted", edit(lambda state: state["lr_scheduler"].update(last_epoch=0))
    ),
    CheckpointFault("schedule_twice_as_far", "consistency.scheduler-step", edit(lambda state: state["lr_scheduler"].update(last_epoch=12))),
    CheckpointFault("folder_misnamed", "consistency.folder-step", lambda root: (root / "step-6").rename(root / "step-7")),
    CheckpointFault(
        "tokens_off", "consistency.tokens", edit(lambda state: state["train_state"].update(ntokens_seen=70)), {"tokens_per_step": 12}
    ),
    CheckpointFault(
        "moments_misaligned",
        "consistency.moment-shape",
        edit(lambda state: _entries(state)["up.weight"].update(exp_avg=torch.ones(8, 13))),
    ),
    CheckpointFault(
        "moments_of_another_model",
        "consistency.orphan-moments",
        edit(lambda state: _entries(state).update({"gate.weight": _entries(state)["up.bias"]})),
    ),
    CheckpointFault(
        "moments_under_a_fused_name",
        "consistency.moments-regrouped",
        edit(lambda state: _entries(state).update({"up.fused": _entries(state).pop("up.weight")})),
    ),
    CheckpointFault(
        "second_moment_of_one_parameter_lost",
        "consistency.moments-unpaired",
        edit(lambda state: _entries(state)["up.bias"].pop("exp_avg_sq")),
    ),
    CheckpointFault(
        "first_moments_lost", "consistency.first-moment-zero", edit(lambda state: _each(state, lambda entry: entry["exp_avg"].zero_()))
    ),
    CheckpointFault(
        "moments_in_bf16",
        "consistency.moments-narrow",
        edit(lambda state: _each(state, lambda entry: entry.update(exp_avg=entry["exp_avg"].bfloat16()))),
    ),
    CheckpointFault(
        "data_positions_of_other_ranks_lost", "consistency.ranks-lost", edit(lambda state: state["dataloader"].update(world_size=4))
    ),
    CheckpointFault(
        "random_numbers_of_a_rank_lost", "consistency.ranks-lost", edit(lambda state: state["rng"].update(rank_2=state["rng"]["rank_0"]))
    ),
    CheckpointFault(
        "tokens_not_those_logged", "consistency.tokens-logged", edit(lambda state: state["train_state"].update(ntokens_seen=84)), log=True
    ),
    CheckpointFault("zero_moments_shifted_by_padding", "state.changed", recut(lambda slot: without_padding(ZERO, slot)), run="zero"),
    CheckpointFault("pointer_to_an_incomplete_save", "commit.pointer", point_to_incomplete),
    CheckpointFault("object_added_after_the_record", "state.added", record_then(lambda state: state.update(note={"by": "someone"}))),
    CheckpointFault(
        "moments_gone_since_the_last_drill", "drift.state-keys", edit(lambda state: _entries(state).pop("norm.bias")), drilled_before=True
    ),
    CheckpointFault("recovery_too_slow", "objectives.rto", leave, {"rto_seconds": 1e-6}),
    CheckpointFault("too_many_steps_lost", "objectives.rpo", leave, {"rpo_steps": 2}, log=True),
    CheckpointFault("tokens_lost_are_not_logged", "objectives.unmeasured", leave, {"rpo_tokens": 100}),
    CheckpointFault("budget_exceeded", "objectives.budget", leave, {"declared": {"budget_nbytes": 1000}}),
    CheckpointFault("export_never_verified", "objectives.export-unverified", leave, {"declared": {"export_schedule": "nightly"}}),
    CheckpointFault("disk_nearly_full", "objectives.free-space", leave, {"spare_factor": 1e12}),
    CheckpointFault("save_blocks_too_long", "objectives.save-blocks", age, {"save_seconds": 600}),
    CheckpointFault("saved_far_too_rarely", "objectives.interval", age, {"save_seconds": 1, "mtbf_seconds": 1000}),
    CheckpointFault(
        "keys_renamed_by_an_upgrade",
        "drift.keys",
        edit(lambda state: state["model"].update({"up_proj.weight": state["model"].pop("up.weight")})),
        drilled_before=True,
    ),
    CheckpointFault("flattening_changed", "drift.flattening", edit(flatten), drilled_before=True),
    CheckpointFault("parameter_order_changed", "drift.parameter-order", edit(swap_groups), drilled_before=True),
    CheckpointFault("trainer_upgraded_between_saves", "drift.versions", other_writer, drilled_before=True),
    CheckpointFault("framework_upgraded", "drift.versions", other_versions, drilled_before=True),
)
