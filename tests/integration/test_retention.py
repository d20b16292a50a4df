"""Retention through its whole line and the real command line, on saves that torch wrote and on recorded ones."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from flows.drill_requests import DrillRequest
from flows.export import run_export
from flows.reading import reading
from flows.requests import ExportRequest
from flows.restore_drill import run_drill
from flows.retention import Retained, RetainRequest, retain
from flows.run import PlainRunner, Silent
from reports.errors import FormatError, RequestError
from tasks.engine.formats.readers import open_checkpoint
from tests.builders.cases import find_case
from tests.builders.many_saves import make_saves, names_in, report_on, verify, written_at


def _run(root: Path, *steps: int) -> Path:
    make_saves(root, steps or range(10, 101, 10))
    names = sorted(names_in(root), key=lambda name: int(name.split("-")[1]))
    verify(root, root.parent / "runs", names[-2:])
    return root


def keep(root: Path, rules: str = "keep_last: 3\n", **options: object) -> Retained:
    """Retain without a command line."""
    (root.parent / "retain.yaml").write_text(rules)
    given = {"root": root, "policy": root.parent / "retain.yaml", "runs": root.parent / "runs"}
    return retain(RetainRequest.model_validate(given | options))


def kept(retained: Retained) -> set[str]:
    """The saves that a plan keeps."""
    return {decision.name for decision in retained.planned.plan.of("keep")}


def test_the_dry_run_says_what_goes_with_bytes_and_apply_does_just_that(command_line, tmp_path):
    root = _run(tmp_path / "run")
    (tmp_path / "retain.yaml").write_text("keep_last: 2\nevery_steps: 40\n")
    asked = ("retain", "run", "--policy", "retain.yaml")
    dry = command_line.run(*asked, cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    nbytes = sum(path.stat().st_size for path in (root / "step-20").iterdir())
    assert f"go    step-20  {nbytes / 1024:.2f} KiB  no rule keeps it" in dry.stdout
    assert "would be given back; --apply deletes" in dry.stdout
    assert len(names_in(root)) == 10
    told = json.loads(command_line.run(*asked, "--json", cwd=tmp_path).stdout)
    going = {one["name"] for one in told["decisions"] if one["action"] == "go"}
    assert going == {"step-20", "step-30", "step-50", "step-60", "step-70"}
    assert told["freed_nbytes"] == sum(one["nbytes"] for one in told["decisions"] if one["name"] in going)
    applied = command_line.run(*asked, "--apply", cwd=tmp_path)
    assert applied.returncode == 0, applied.stderr
    assert names_in(root) == {"step-10", "step-40", "step-80", "step-90", "step-100"}
    written = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/plan.json"), key=os.path.getmtime)]
    assert len(written) == 3
    assert written[0] == written[2]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("keep_lats: 3\n", "keep_lats: unknown"),
        ("keep_last: 0\n", "greater than or equal to 1"),
        ("milestones: 5\n", "milestones"),
        ("pins: [{step: 3}]\n", "because: missing"),
        ("every_tokens: 100\n", "needs tokens"),
        ("- 1\n", "retain.yaml:1"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_its_line(tmp_path, policy, told):
    root = _run(tmp_path / "run")
    with pytest.raises(RequestError, match=told):
        keep(root, policy)


def test_a_policy_that_says_nothing_is_refused(tmp_path):
    # A file that was cut short would otherwise thin out the whole history by the defaults.
    with pytest.raises(RequestError, match="says nothing of what to keep"):
        keep(_run(tmp_path / "run"), "# to do\n")


def test_nothing_is_deleted_without_a_policy(tmp_path):
    root = _run(tmp_path / "run")
    with pytest.raises(RequestError, match="deletes nothing without a policy"):
        keep(root, apply=True, policy=None)
    assert len(names_in(root)) == 10


def test_a_root_without_saves_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(FormatError, match="holds no save"):
        keep(tmp_path / "run")


def test_runs_inside_the_root_are_refused(tmp_path):
    root = _run(tmp_path / "run")
    with pytest.raises(RequestError, match="lies inside the run"):
        keep(root, runs=root / "runs")


def test_steps_are_in_numeric_order(tmp_path):
    root = _run(tmp_path / "run", 900, 9900, 10000, 10100)
    assert kept(keep(root, "keep_last: 2")) == {"step-10000", "step-10100"}


def test_a_save_that_a_report_names_stays(tmp_path):
    root = _run(tmp_path / "run")
    report_on(tmp_path / "runs", "export-1", f"{root.resolve()}/step-20 (step 20)")
    report_on(tmp_path / "runs", "gate-1", "/elsewhere", subject=f"{root.resolve()}/step-30/inner")
    report_on(tmp_path / "runs", "retain-1", f"{root.resolve()}/step-50", kind="retain")
    report_on(tmp_path / "runs", "export-2", f"{root.resolve()}/step-5")  # no prefix of a name counts
    assert kept(keep(root)) == {"step-20", "step-30", "step-80", "step-90", "step-100"}


def test_a_save_that_many_reports_name_takes_one_short_line(command_line, tmp_path):
    root = _run(tmp_path / "run")
    for number in range(100):
        report_on(tmp_path / "runs", f"gate-{number:03}", f"{root.resolve()}/step-20")
    shown = command_line.run("retain", "run", cwd=tmp_path).stdout
    (line,) = [line for line in shown.splitlines() if " step-20 " in line]
    assert "named by the report of gate-000" in line
    assert line.endswith("; … and 94 more reasons")


def test_real_drills_verify_and_real_exports_name_what_they_read(tmp_path):
    root, runs = make_saves(tmp_path / "run", range(10, 101, 10)), tmp_path / "runs"
    run_drill(DrillRequest(root=root, runs=runs), PlainRunner())
    request = ExportRequest(source=root, step=20, to=tmp_path / "out", family="none", skip=["logits=none"], runs=runs)
    run_export(request, PlainRunner(), Silent())
    run_export(request.model_copy(update={"source": root / "step-30", "step": None, "to": tmp_path / "out30"}), PlainRunner(), Silent())
    retained = keep(root, "keep_last: 1", apply=True)
    assert names_in(root) == {"step-20", "step-30", "step-90", "step-100"}
    reasons = {decision.step: decision.because for decision in retained.planned.plan.decisions}
    assert reasons[20][0].startswith("named by the report of export-")
    assert reasons[90] == ("among the last two verified",)
    assert not list(runs.glob("*/reading.json"))


def test_a_save_that_a_running_export_reads_stays_until_it_ends(tmp_path):
    root = _run(tmp_path / "run")
    (tmp_path / "runs" / "export-1").mkdir(parents=True)
    with reading(tmp_path / "runs" / "export-1", [root / "step-20"]):
        retained = keep(root)
        assert "step-20" in kept(retained)
        assert "export-1 is reading it" in str(retained.planned.plan.decisions[1].because)
    assert "step-20" not in kept(keep(root))


def test_nothing_goes_while_a_run_chooses_a_save_of_the_root(tmp_path):
    root = _run(tmp_path / "run")
    (tmp_path / "runs" / "export-1").mkdir(parents=True)
    with reading(tmp_path / "runs" / "export-1", [root]):
        assert len(kept(keep(root))) == 10


def test_a_pointer_holds_its_save_by_name_or_by_step(tmp_path):
    root = _run(tmp_path / "run")
    (root / "latest").write_text("step-20")
    assert "step-20" in kept(keep(root))
    (root / "latest").unlink()
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    assert "step-20" not in kept(keep(root))


def test_links_are_not_followed_out_of_the_root(tmp_path):
    outside = make_saves(tmp_path / "outside", [5])
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    root = _run(tmp_path / "run")
    (root / "step-5").symlink_to(outside / "step-5")
    (root / "step-10" / "extra").symlink_to(tmp_path)
    written_at(root / "step-10", 10)
    retained = keep(root, apply=True)
    assert "a link, which is not followed" in str(retained.planned.plan.decisions[0].because)
    assert (root / "step-5").is_symlink()
    assert names_in(outside) == {"step-5"}
    assert not (root / "step-10").exists()
    assert precious.read_text() == "keep me"


def test_a_save_that_changed_since_it_was_planned_stays(tmp_path, monkeypatch):
    import flows.retention

    root = _run(tmp_path / "run")

    def plan_and_write(*arguments):
        planned = plan_root(*arguments)
        (root / "step-20" / "more").write_text("still being written")
        return planned

    plan_root = flows.retention.plan_root
    monkeypatch.setattr(flows.retention, "plan_root", plan_and_write)
    retained = keep(root, apply=True)
    assert retained.left == (("step-20", "it changed since it was planned"),)
    assert names_in(root) == {"step-20", "step-80", "step-90", "step-100"}
    assert not retained.report.verdict().green


def test_a_save_that_a_run_began_to_read_since_the_plan_stays(tmp_path, monkeypatch):
    import flows.retention

    root = _run(tmp_path / "run")
    (tmp_path / "runs" / "export-1").mkdir(parents=True)
    begun = reading(tmp_path / "runs" / "export-1", [root / "step-20"])

    def plan_and_begin(*arguments):
        planned = plan_root(*arguments)
        begun.__enter__()
        return planned

    plan_root = flows.retention.plan_root
    monkeypatch.setattr(flows.retention, "plan_root", plan_and_begin)
    retained = keep(root, apply=True)
    begun.__exit__(None, None, None)
    assert retained.left == (("step-20", "export-1 is reading it"),)
    assert "still there" in retained.paths.html.read_text()


def test_a_save_that_looks_whole_but_is_not_is_not_what_others_go_for(tmp_path):
    # The metadata promises a tensor that its file does not hold: only opening it tells.
    root = _run(tmp_path / "run")
    content = (root / "step-40" / ".metadata").read_bytes()
    (root / "step-40" / ".metadata").unlink()
    (root / "step-40" / ".metadata").write_bytes(content.replace(b"state_dict_metadata", b"state_dict_metadatx"))
    written_at(root / "step-40", 40)
    assert kept(keep(root, "keep_last: 2\nevery_steps: 40\n")) == {"step-10", "step-50", "step-80", "step-90", "step-100"}


def test_spikes_and_switches_of_the_log_are_pinned_on_both_sides(tmp_path):
    root = _run(tmp_path / "run", *range(10, 201, 10))
    with (tmp_path / "log.jsonl").open("w") as log:
        for step in range(1, 201):
            loss = 3.0 - step / 200 + 0.01 * (step % 7) + (2.0 if step in (95, 96) else 0.0)
            log.write(json.dumps({"step": step, "rank": 0, "loss": loss, "data": "v1" if step <= 44 else "v2"}) + "\n")
    retained = keep(root, log=tmp_path / "log.jsonl")
    assert kept(retained) == {"step-40", "step-50", "step-90", "step-100", "step-180", "step-190", "step-200"}
    reasons = {decision.name: decision.because for decision in retained.planned.plan.decisions}
    assert reasons["step-90"] == reasons["step-100"]
    assert reasons["step-90"][0].startswith("beside the loss spike at steps 95 to 96")
    assert reasons["step-40"] == ("beside the switch of data at step 45, from v1 to v2",)


def test_tokens_of_the_log_space_the_saves(tmp_path):
    root = _run(tmp_path / "run")
    (tmp_path / "log.csv").write_text("step,loss,tokens\n" + "".join(f"{step},2.0,100\n" for step in range(1, 101)))
    assert kept(keep(root, "every_tokens: 5000\nkeep_last: 1\n", log=tmp_path / "log.csv")) == {"step-10", "step-50", "step-90", "step-100"}


def test_a_save_that_vanishes_while_it_is_looked_at_is_passed_by(tmp_path, monkeypatch):
    import tasks.sight

    root = _run(tmp_path / "run")

    def list_one_more(folder):
        return {**list_steps(folder), 35: ["step-35"]}

    list_steps = tasks.sight.list_steps
    monkeypatch.setattr(tasks.sight, "list_steps", list_one_more)
    retained = keep(root, apply=True)
    assert names_in(root) == {"step-80", "step-90", "step-100"}
    assert "No such file" in str(retained.planned.plan.decisions[3].because)


@pytest.mark.cases
@pytest.mark.parametrize(
    ("case", "name", "gone", "stays"),
    [
        ("accelerate_fsdp2_w2_llama/ckpt", "checkpoint_{}", "optimizer_0", "pytorch_model_fsdp_0/.metadata"),
        ("hf_trainer_llama/ckpt/checkpoint-3", "checkpoint-{}", "optimizer.pt", "model.safetensors"),
        ("mg_llama_distopt_tp2dp2_legacy/ckpt/iter_0000010", "iter_{:07}", "mp_rank_00/distrib_optim.pt", "mp_rank_00/model_optim_rng.pt"),
    ],
)
def test_weights_only_are_kept_where_the_format_has_them_apart(case, name, gone, stays, tmp_path):
    root = tmp_path / "run"
    for step in range(1, 9):
        shutil.copytree(find_case(case), root / name.format(step), copy_function=shutil.copyfile)
    verify(root, tmp_path / "runs", [name.format(7), name.format(8)])
    retained = keep(root, "keep_last: 2\nweights_only_every_steps: 4\n", apply=True)
    assert names_in(root) == {name.format(step) for step in (1, 4, 7, 8)}
    assert [found for result in retained.report.results for found in result.findings] == []
    thinned = root / name.format(4)
    assert not (thinned / gone).exists()
    assert (thinned / stays).is_file()
    assert open_checkpoint(thinned).catalog().tensors.keys() == open_checkpoint(find_case(case)).catalog().tensors.keys()
    again = keep(root, "keep_last: 2\nweights_only_every_steps: 4\n", apply=True)
    assert (again.planned.plan.of("go"), again.planned.plan.of("thin")) == ((), ())
    assert {path.name for path in root.iterdir()} == {name.format(step) for step in (1, 4, 7, 8)}


@pytest.mark.cases
@pytest.mark.parametrize("case", ["damaged_no_metadata", "damaged_metadata_truncated", "damaged_rank3_missing"])
def test_a_damaged_save_is_not_acted_on_and_counts_for_nothing(case, tmp_path):
    root = _run(tmp_path / "run")
    shutil.copytree(find_case(case) / "ckpt", root / "step-25", copy_function=shutil.copyfile)
    shutil.copytree(find_case(case) / "ckpt", root / "step-85", copy_function=shutil.copyfile)
    retained = keep(root, "keep_last: 3\n", apply=True)
    assert names_in(root) == {"step-25", "step-80", "step-85", "step-90", "step-100"}
    assert retained.planned.plan.decisions[2].because[0].startswith("not acted on: ")


@pytest.mark.cases
@pytest.mark.parametrize("case", ["ds_zero2_bf16_ws3", "mg_llama_untied_tp2pp2_legacy", "mg_qwen3_tp2_torchdist", "tp2_fsdp2_w4_llama"])
def test_saves_of_other_formats_are_taken_too(case, tmp_path):
    source = find_case(case) / "ckpt"
    folders = [path for path in source.iterdir() if path.is_dir() and path.name.startswith(("iter_", "global_step"))]
    pattern = "iter_{:07d}" if case.startswith("mg_") else "global_step{}"
    root = tmp_path / "run"
    for step in range(1, 6):
        shutil.copytree(folders[0] if folders else source, root / pattern.format(step), copy_function=shutil.copyfile)
    verify(root, tmp_path / "runs", [pattern.format(4), pattern.format(5)])
    keep(root, "keep_last: 2", apply=True)
    assert names_in(root) == {pattern.format(4), pattern.format(5)}


def test_ten_thousand_saves_are_listed_and_planned_in_seconds(tmp_path):
    root = _run(tmp_path / "run", *range(1, 10_001))
    begun = time.process_time()
    retained = keep(root, "every_steps: 100\n")
    assert time.process_time() - begun <= 5
    assert len(retained.planned.plan.of("go")) == 10_000 - 101 - 3 + 1
