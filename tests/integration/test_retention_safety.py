"""What must never be lost: each way in which somebody still needs a save, and in which the world changes between plan and deletion."""

import shutil
from pathlib import Path

import pytest
import torch

import tasks.listing
import tasks.retain as retain_steps
from flows.drill_requests import DrillRequest
from flows.export import run_export
from flows.ledger import LedgerRequest, make_ledger
from flows.reading import reading
from flows.requests import ExportRequest
from flows.restore_drill import DrillFailedError, run_drill
from flows.run import PlainRunner, Silent
from reports.errors import CommitError
from tasks.retain import apply_plan, plan_root
from tests.builders.many_saves import make_saves, names_in, report_on, verify, written_at
from tests.integration.test_retention import keep, kept
from validators.retention.policy import RetentionPolicy

ALWAYS = {"step-80", "step-90", "step-100"}


@pytest.fixture
def root(tmp_path) -> Path:
    """Ten saves, the last two verified."""
    make_saves(tmp_path / "run", range(10, 101, 10))
    verify(tmp_path / "run", tmp_path / "runs", ["step-90", "step-100"])
    return (tmp_path / "run").resolve()


def _reasons(retained) -> dict[str, str]:
    return {decision.name: "; ".join(decision.because) for decision in retained.planned.plan.decisions}


class TestVerified:
    def test_a_red_drill_verifies_nothing(self, root, tmp_path):
        (tmp_path / "runs" / "drills.jsonl").unlink()
        verify(root, tmp_path / "runs", ["step-90", "step-100"], green=False)
        assert len(kept(keep(root))) == 10

    def test_the_latest_drill_of_a_save_decides(self, root, tmp_path):
        verify(root, tmp_path / "runs", ["step-90"], green=False)
        assert keep(root).planned.plan.blocked == "1 that a green drill has read whole"
        verify(root, tmp_path / "runs", ["step-90"])
        assert kept(keep(root)) == ALWAYS

    def test_a_drill_that_finds_damage_takes_the_word_of_an_earlier_one_back(self, tmp_path):
        root, runs = make_saves(tmp_path / "run", (10, 20, 30)), tmp_path / "runs"
        for _ in range(2):
            run_drill(DrillRequest(root=root, runs=runs), PlainRunner())
        assert not keep(root).planned.plan.blocked
        path = root / "step-30" / "__0_0.distcp"
        content = bytearray(path.read_bytes())
        place = content.index(torch.arange(6.0).numpy().tobytes())
        content[place] ^= 1
        path.write_bytes(content)
        written_at(root / "step-30", 30)
        with pytest.raises(DrillFailedError):
            run_drill(DrillRequest(root=root, runs=runs), PlainRunner())
        assert "among the last two verified" not in _reasons(keep(root))["step-30"]

    @pytest.mark.parametrize("name", ["added", "__0_0.distcp"])
    def test_files_that_are_not_those_the_drill_read_are_not_verified(self, root, name):
        with (root / "step-90" / name).open("ab") as file:
            file.write(b"x")
        written_at(root / "step-90", 90)  # as rsync and cp keep times
        assert keep(root).planned.plan.blocked

    def test_a_verified_save_that_does_not_open_is_not_counted(self, root, tmp_path):
        content = (root / "step-100" / ".metadata").read_bytes()
        (root / "step-100" / ".metadata").write_bytes(content.replace(b"state_dict_metadata", b"state_dict_metadatx"))
        verify(root, tmp_path / "runs", ["step-100"])
        assert keep(root).planned.plan.blocked == "1 that a green drill has read whole"


class TestClaims:
    @pytest.mark.parametrize(
        "text", ["{", "[]", "{}", "[" * 100_000, '{"kind": "export"}', '{"source": "/x"}', '{"kind": "export", "source": 3}']
    )
    def test_a_report_that_says_nothing_holds_every_save(self, root, tmp_path, text):
        (tmp_path / "runs" / "export-1").mkdir()
        (tmp_path / "runs" / "export-1" / "report.json").write_text(text)
        told = _reasons(keep(root))
        assert len(kept(keep(root))) == 10
        assert "export-1 cannot be read, and may name it" in told["step-10"]

    def test_a_name_with_a_bracket_is_not_cut(self, tmp_path):
        root = make_saves(tmp_path / "run (old)", range(10, 101, 10)).resolve()
        verify(root, tmp_path / "runs", ["step-90", "step-100"])
        report_on(tmp_path / "runs", "export-1", f"{root}/step-20 (dcp, step 20)")
        assert kept(keep(root)) == {"step-20", *ALWAYS}

    def test_an_export_by_a_link_holds_what_the_link_led_to(self, root, tmp_path):
        best = tmp_path / "best"
        best.symlink_to(root / "step-30")
        request = ExportRequest(source=best, to=tmp_path / "out", family="none", skip=["logits=none"], runs=tmp_path / "runs")
        run_export(request, PlainRunner(), Silent())
        best.unlink()
        best.symlink_to(root / "step-90")
        assert kept(keep(root)) == {"step-30", *ALWAYS}

    def test_a_path_that_is_not_here_may_be_the_same_folder_elsewhere(self, root, tmp_path):
        # A root that was moved since, or one that is mounted elsewhere on the machine that exported.
        report_on(tmp_path / "runs", "export-1", "/mnt/cluster/run/step-20 (dcp, step 20)")
        assert kept(keep(root)) == {"step-20", *ALWAYS}

    def test_a_save_of_the_same_name_in_another_run_is_not_this_one(self, root, tmp_path):
        other = make_saves(tmp_path / "other", [20]).resolve()
        report_on(tmp_path / "runs", "export-1", f"{other}/step-20 (dcp, step 20)", checkpoint=f"{other}/step-20")
        assert kept(keep(root)) == ALWAYS

    def test_an_evaluation_that_a_ledger_knows_holds_its_save(self, root, tmp_path):
        (tmp_path / "result.json").write_text('{"step": 20, "results": {"arc/acc": 0.5}}')
        make_ledger(LedgerRequest(root=root, evals=[tmp_path / "result.json"], runs=tmp_path / "runs"))
        retained = keep(root)
        assert kept(retained) == {"step-20", *ALWAYS}
        assert "has an evaluation of it" in _reasons(retained)["step-20"]

    def test_a_kept_save_whose_file_is_a_link_holds_where_that_leads(self, root, tmp_path):
        (root / "step-100" / "__0_0.distcp").unlink()
        (root / "step-100" / "__0_0.distcp").symlink_to("../step-20/__0_0.distcp")
        verify(root, tmp_path / "runs", ["step-100"])
        retained = keep(root)
        assert kept(retained) == {"step-20", *ALWAYS}
        assert _reasons(retained)["step-20"] == "a link in step-100 leads to it"

    def test_each_place_that_a_chain_of_links_passes_is_held(self, root, tmp_path):
        # As savers leave them that store an unchanged file once
        (root / "step-50" / "shared").symlink_to("../step-20/shared")
        (root / "step-20" / "shared").write_text("weights")
        (root / "step-100" / "shared").symlink_to("../step-50/shared")
        for step in (20, 50, 100):
            written_at(root / f"step-{step}", step)
        verify(root, tmp_path / "runs", ["step-100"])
        assert kept(keep(root)) == {"step-20", "step-50", *ALWAYS}

    def test_a_link_that_passes_a_save_holds_it_too(self, root):
        (root / "step-50" / "here").symlink_to("../step-20")
        written_at(root / "step-50", 50)
        (root / "best").symlink_to("step-50/here")
        assert kept(keep(root)) == {"step-20", "step-50", *ALWAYS}

    def test_links_in_a_save_that_is_a_link_hold_where_they_lead(self, root, tmp_path):
        elsewhere = tmp_path / "disk" / "step-110"
        shutil.copytree(root / "step-100", elsewhere)
        (elsewhere / "shared").symlink_to(root / "step-20" / ".metadata")
        (root / "step-110").symlink_to(elsewhere)
        assert "step-20" in kept(keep(root))

    def test_a_folder_of_saves_is_not_one_save(self, root):
        (root / "save_1").mkdir()
        shutil.copytree(root / "step-20", root / "save_1" / "step-20")
        shutil.copytree(root / "step-30", root / "step-40" / "old" / "step-30")
        told = _reasons(keep(root))
        assert told["save_1"] == "not acted on: it holds another save, step-20"
        assert told["step-40"].startswith("not acted on: it holds another save, step-30")

    def test_reports_of_drills_hold_what_they_name_unless_the_policy_lets_them_go(self, root, tmp_path):
        report_on(tmp_path / "runs", "drill-1", f"{root}/step-20 (newest complete save)", kind="drill", subject=str(root))
        assert kept(keep(root)) == {"step-20", *ALWAYS}
        assert kept(keep(root, "keep_last: 3\nhold_drilled: false\n")) == ALWAYS

    def test_a_ledger_of_a_root_that_was_moved_holds_too(self, root, tmp_path):
        (tmp_path / "result.json").write_text('{"step": 20, "results": {"arc/acc": 0.5}}')
        make_ledger(LedgerRequest(root=root, evals=[tmp_path / "result.json"], runs=tmp_path / "runs"))
        moved = root.rename(tmp_path / "moved")
        verify(moved, tmp_path / "runs", ["step-90", "step-100"])
        assert kept(keep(moved)) == {"step-20", *ALWAYS}

    def test_links_in_folders_beside_the_saves_hold_where_they_lead(self, root):
        (root / "best" / "model").mkdir(parents=True)
        (root / "best" / "model" / "weights").symlink_to(root / "step-30")
        assert kept(keep(root)) == {"step-30", *ALWAYS}

    def test_a_root_by_another_name_is_the_same(self, root, tmp_path):
        (tmp_path / "alias").symlink_to(root)
        (tmp_path / "runs" / "drill-2").mkdir()
        with reading(tmp_path / "runs" / "drill-2", [tmp_path / "alias"]):
            assert len(kept(keep(root))) == 10


class TestBetweenPlanAndDeletion:
    @pytest.fixture
    def planned(self, root, tmp_path):
        return plan_root(root, RetentionPolicy(keep_last=3), (), tmp_path / "runs")

    def test_an_export_that_has_come_and_gone_holds_its_save(self, root, tmp_path, planned):
        report_on(tmp_path / "runs", "export-9", f"{root}/step-20 (dcp, step 20)")
        assert apply_plan(root, planned, tmp_path / "runs") == (("step-20", "named by the report of export-9"),)
        assert names_in(root) == {"step-20", *ALWAYS}

    def test_a_pointer_that_has_moved_holds_its_save(self, root, tmp_path, planned):
        (root / "latest").write_text("step-30")
        assert dict(apply_plan(root, planned, tmp_path / "runs")) == {"step-30": "the pointer file latest names it"}

    def test_a_reader_that_begins_between_the_last_look_and_the_renaming_keeps_its_save(self, root, tmp_path, planned, monkeypatch):
        (tmp_path / "runs" / "export-9").mkdir()
        begun, rename = reading(tmp_path / "runs" / "export-9", [root / "step-20"]), Path.rename

        def begin_and_rename(path: Path, target: Path) -> Path:
            if path.name == "step-20" and not (tmp_path / "runs" / "export-9" / "reading.json").exists():
                begun.__enter__()
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", begin_and_rename)
        assert apply_plan(root, planned, tmp_path / "runs") == (("step-20", "export-9 is reading it"),)
        begun.__exit__(None, None, None)
        assert names_in(root) == {"step-20", *ALWAYS}

    @pytest.mark.parametrize("lost", ["step-90", "step-100"])
    def test_nothing_goes_when_a_save_it_relies_on_is_gone(self, root, tmp_path, planned, lost):
        shutil.rmtree(root / lost)
        left = apply_plan(root, planned, tmp_path / "runs")
        assert len(left) == 7
        assert f"{lost}, without which nothing may go, changed since it was planned" in left[0][1]

    def test_a_deletion_that_had_not_begun_is_planned_anew(self, root, tmp_path):
        # Killed between the renaming and the first file: whatever holds a save holds this one.
        (root / "step-20").rename(root / ".step-20.shardwright-going")
        (root / "step-30").rename(root / ".step-30.shardwright-going")
        retained = keep(root, "keep_last: 3\npins: [{step: 20, because: we resume from here}]\n", apply=True)
        assert names_in(root) == {"step-20", *ALWAYS}
        assert not list(root.glob(".step*"))
        assert "step-30: renamed by an interrupted run and still whole; it has its name back" in retained.report.notes

    def test_one_that_had_begun_is_finished(self, root):
        (root / "step-20").rename(root / ".step-20.shardwright-going")
        (root / ".step-20.shardwright-going" / ".metadata").unlink()
        dry = keep(root, apply=False)
        assert dry.planned.plan.unfinished == (".step-20.shardwright-going",)
        keep(root, apply=True)
        assert not list(root.glob(".step*"))

    def test_what_its_trainer_deleted_meanwhile_is_gone(self, root, tmp_path, planned):
        shutil.rmtree(root / "step-20")
        assert apply_plan(root, planned, tmp_path / "runs") == ()

    def test_a_red_drill_meanwhile_stops_it(self, root, tmp_path, planned):
        verify(root, tmp_path / "runs", ["step-90"], green=False)
        left = apply_plan(root, planned, tmp_path / "runs")
        assert len(left) == 7
        assert left[0][1].startswith("a drill since then did not find whole")

    def test_one_process_at_a_time(self, root, tmp_path, planned, monkeypatch):
        delete = shutil.rmtree

        def try_too(path: Path) -> None:
            with pytest.raises(CommitError, match="another --apply of this run"):
                apply_plan(root, planned, tmp_path / "runs")
            delete(path)

        monkeypatch.setattr(retain_steps.shutil, "rmtree", try_too)
        assert apply_plan(root, planned, tmp_path / "runs") == ()
        assert names_in(root) == ALWAYS

    def test_the_oldest_goes_first_and_is_renamed_on_disk_before_it_is_emptied(self, root, tmp_path, planned, monkeypatch):
        done: list[str] = []
        delete, sync = shutil.rmtree, retain_steps.sync_folder
        monkeypatch.setattr(retain_steps, "sync_folder", lambda folder: (done.append(f"sync {folder.name}"), sync(folder)))
        monkeypatch.setattr(retain_steps.shutil, "rmtree", lambda path: (done.append(path.name), delete(path)))
        apply_plan(root, planned, tmp_path / "runs")
        assert done == [entry for step in range(10, 80, 10) for entry in ("sync run", f".step-{step}.shardwright-going")]

    def test_what_is_half_deleted_is_called_so_and_counts_for_nothing(self, root, monkeypatch):
        def fail(path: Path) -> None:
            (path / ".metadata").unlink()
            raise PermissionError(1, "Operation not permitted", str(path))

        planned = keep(root)
        monkeypatch.setattr(retain_steps.shutil, "rmtree", fail)
        retained = keep(root, apply=True)
        assert planned.freed_nbytes > 0
        assert retained.freed_nbytes == 0
        assert all(why.startswith(f"half-deleted, as .{name}.shardwright-going: ") for name, why in retained.left)


class TestTheWholeRun:
    def test_the_latest_written_stays_and_so_do_as_many_by_time_as_by_step(self, root):
        # Training went back to step 20 and writes anew; the numbers above are of what it left.
        written_at(root / "step-20", 200)
        written_at(root / "step-30", 300)
        retained = keep(root, "keep_last: 2\n")
        assert kept(retained) == {"step-20", "step-30", "step-90", "step-100"}
        assert _reasons(retained)["step-30"].startswith("the last one written")

    def test_what_is_mounted_in_a_save_is_not_emptied(self, root, tmp_path, monkeypatch):
        mounts = tmp_path / "mountinfo"
        mounts.write_text(f"36 35 98:0 / {root}/step-30/scratch\\040disk rw - ext3 /dev/root rw\n1 1 0:1 / / rw - ext4 /dev/a rw\n")
        monkeypatch.setattr(tasks.listing, "_MOUNTS", mounts)
        retained = keep(root, apply=True)
        assert names_in(root) == {"step-30", *ALWAYS}
        assert "step-30/scratch disk is mounted in it" in _reasons(retained)["step-30"]

    def test_a_budget_is_filled_with_the_newest_beside_what_must_stay(self, root):
        nbytes = sum(path.stat().st_size for path in (root / "step-20").iterdir())
        policy = f"keep_last: 1\nevery_steps: 50\nbudget_nbytes: {5 * nbytes}\n"  # 10, 50, 90, 100 stay anyway
        assert kept(keep(root, policy)) == {"step-10", "step-50", "step-80", "step-90", "step-100"}

    def test_a_save_after_the_tracker_is_not_acted_on(self, root):
        (root / "latest_checkpointed_iteration.txt").write_text("70")
        assert "is after 70, the last its writer called finished" in _reasons(keep(root))["step-80"]

    def test_names_of_one_file_give_their_bytes_back_with_the_last(self, root, tmp_path):
        (root / "step-20" / "shared").write_bytes(b"x" * 5000)
        (root / "step-30" / "shared").hardlink_to(root / "step-20" / "shared")
        (root / "step-40" / "kept").hardlink_to(root / "step-100" / ".metadata")
        for step in (100, 20, 30, 40):
            written_at(root / f"step-{step}", step)
        verify(root, tmp_path / "runs", ["step-100"])
        retained = keep(root)
        own = sum(path.stat().st_size for path in (root / "step-10").iterdir())
        assert retained.freed_nbytes == 7 * own + 5000
