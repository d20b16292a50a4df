"""The drill's commands as a user types them: exit codes, what is printed, and the flow inside Prefect."""

import json
import shutil
from pathlib import Path

import pytest

from tests.builders.trainer import write_run


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commanded") / "run"
    write_run(folder)
    return folder


@pytest.mark.slow
def test_record_drill_and_drills_go_together(command_line, root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "run"))
    recorded = command_line.run("record", copy, "--step", "6")
    assert recorded.returncode == 0
    assert recorded.stdout.startswith("recorded ")
    again = command_line.run("record", copy, "--step", "6")
    assert (again.returncode, "is recorded already" in again.stderr) == (2, True)
    green = command_line.run("drill", copy, "--runs", tmp_path / "runs", "--junit", tmp_path / "drill.xml")
    assert green.returncode == 0, green.stderr
    assert "restorable, " in green.stdout
    assert "mapping" not in green.stdout
    assert "<testsuite" in (tmp_path / "drill.xml").read_text()
    (copy / "step-6" / ".metadata").unlink()
    (copy / "step-3" / ".metadata").unlink()
    red = command_line.run("drill", copy, "--runs", tmp_path / "runs", "--json")
    assert red.returncode == 1, red.stderr
    told = json.loads(red.stdout)
    assert (told["green"], "mapping" in told) == (False, False)
    assert "commit.none-complete" in {finding["code"] for finding in told["findings"]}
    listed = command_line.run("drills", copy, "--runs", tmp_path / "runs").stdout.splitlines()
    assert ["green" in listed[0], "red" in listed[1]] == [True, True]
    assert "commit.none-complete" in listed[2]
    assert str(copy) not in listed[0]
    of_all = [json.loads(line) for line in command_line.run("drills", "--runs", tmp_path / "runs", "--json").stdout.splitlines()]
    assert [past["root"] for past in of_all] == [str(copy)] * 2
    assert command_line.run("drills", "--runs", tmp_path / "runs").stdout.splitlines()[0].endswith(f"  of {copy}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--level", "D2", "--resume", "a:b"], "level D3"),
        (["--resume", "nonsense"], "--resume"),
        (["--goals", "absent.yaml"], "is not a file"),
        (["--steps", "1"], "--steps"),
    ],
)
def test_requests_that_cannot_be_are_refused(command_line, root, tmp_path, arguments, told):
    refused = command_line.run("drill", root, "--runs", tmp_path / "runs", *arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert told in refused.stderr


def test_inspect_answers_the_checklist_and_knows_of_the_last_drill(command_line, root, tmp_path):
    shown = command_line.run("inspect", root, cwd=tmp_path)
    assert shown.returncode == 0
    assert "Is it full or model-only?  full" in shown.stdout
    assert "never, as far as is known" in shown.stdout
    machine = json.loads(command_line.run("inspect", root, "--json", cwd=tmp_path).stdout)
    assert len(machine["readiness"]) == 10
    assert {part["name"]: part["presence"] for part in machine["inventory"]}["random numbers"] == "present"


def test_inspect_answers_what_no_checkpoint_knows_from_the_drills_yaml(command_line, root, tmp_path):
    (tmp_path / "drill.yaml").write_text("declared:\n  on_failed_save: stops after three tries\n  export_schedule: nightly\n")
    told = command_line.run("inspect", root, "--goals", "drill.yaml", "--json", cwd=tmp_path).stdout
    answers = {answer["question"]: answer["answer"] for answer in json.loads(told)["readiness"]}
    assert answers["What does training do when a save fails?"] == "stops after three tries"
    assert answers["Is a release export scheduled?"] == "nightly"
    refused = command_line.run("inspect", root, "--goals", "none.yaml", cwd=tmp_path)
    assert (refused.returncode, "none.yaml" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_the_flow_shows_its_report_in_prefect(root, tmp_path, prefect_server):
    from prefect.client.orchestration import get_client

    from flows.drill_requests import DrillRequest
    from flows.restore_drill import restore_drill

    page = restore_drill(DrillRequest(root=root, runs=tmp_path / "runs"))
    assert Path(page).is_file()
    with get_client(sync_client=True) as client:
        keys = {artifact.key for artifact in client.read_artifacts(limit=200)}
    assert "report" in keys  # checks have pages of their own only where they did not pass
