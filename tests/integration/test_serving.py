"""`shardwright serve`, for real: its server answers, what it offers runs when asked, and it leaves nothing behind when told to stop."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.served import CASE, QUICK, ROOT, Served, make_run, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """A server that looks after a training run with one complete step."""
    place = tmp_path_factory.mktemp("served")
    make_run(place)
    with serving(place, "--root", "run", "--evaluations", "evaluations", "--assets", str(CASE / "hf"), "--runs", "kept here") as running:
        yield running


def test_the_page_is_served_and_knows_its_own_port(served):
    assert "<html" in httpx.get(f"{served.page}/v2/", timeout=60, follow_redirects=True).text.lower()
    settings = httpx.get(f"{served.page}/ui-settings", timeout=60, follow_redirects=True)
    assert settings.json()["api_url"] == served.api


def test_forms_describe_their_fields(served):
    for name in (
        "export/on-demand",
        "release%20gate/on-demand",
        "restore%20drill/on-demand",
        "export%20newest/evaluation",
        "retention%20plan/on-demand",
    ):
        schema = served.deployment(name)["parameter_openapi_schema"]
        fields = next(iter(schema["definitions"].values()))["properties"]
        assert len(fields) > 4
        assert [field for field, said in fields.items() if not said.get("description")] == []


def test_the_newest_checkpoint_is_exported_once(served):
    first = served.run("export%20newest/evaluation")
    assert (first["name"], first["state_type"]) == ("newest of run", "COMPLETED")
    assert (served.place / "evaluations/step-3/shardwright.committed").is_file()
    assert "published" in served.artifacts(first)["report"]
    before = {path: path.stat().st_mtime_ns for path in (served.place / "evaluations").rglob("*")}
    second = served.run("export%20newest/evaluation")
    assert second["state_type"] == "COMPLETED"
    assert f"step 3 is exported already: {served.place / 'evaluations/step-3'}" in served.logs(second, "exported already")
    assert {path: path.stat().st_mtime_ns for path in (served.place / "evaluations").rglob("*")} == before
    assert len(list((served.place / "kept here").glob("export-*"))) == 1


def test_a_plan_of_what_may_go_is_shown_and_deletes_nothing(served):
    plan = served.run("retention%20plan/weekly-plan")
    assert (plan["name"], plan["state_type"]) == ("plan of run", "COMPLETED")
    shown = served.artifacts(plan)
    assert "nothing was deleted" in shown["report"]
    assert "step-3" in shown["plan"]
    assert (served.place / "run/step-3").is_dir()


def test_a_red_gate_fails_its_run_and_says_why(served):
    folder = served.place / "broken"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    (folder / "config.json").write_text("{}")
    run = served.run("release%20gate/on-demand", release=str(folder))
    assert (run["name"], run["state_type"]) == ("gate broken", "FAILED")
    assert "files.malformed" in run["state"]["message"]
    assert "not accepted" in served.artifacts(run)["report"]


EXPORT, GATE, DRILL, NEWEST, PLAN = (
    "export/on-demand",
    "release%20gate/on-demand",
    "restore%20drill/on-demand",
    "export%20newest/evaluation",
    "retention%20plan/on-demand",
)


@pytest.mark.parametrize(
    ("deployment", "request_", "word"),
    [
        (EXPORT, {"source": "/nowhere", "to": "x", "dtype": "int7"}, "int7"),
        (EXPORT, {"to": "x"}, "source"),
        (EXPORT, {"source": "a", "to": "b", "workerz": 1}, "workerz"),
        (GATE, {"release": "a", "weights": "other"}, "other"),
        (GATE, {}, "release"),
        (DRILL, {"root": "a", "level": "D4"}, "D4"),
        (DRILL, {"root": "a", "steps": 1}, "1 is less than the minimum of 3"),
        (NEWEST, {"root": "a", "into": "b", "dtype": "int7"}, "int7"),
        (NEWEST, {"root": "a"}, "into"),
        (PLAN, {"root": "a", "apply": True}, "apply"),
    ],
)
def test_a_form_filled_in_wrongly_is_refused_at_once(served, deployment, request_, word):
    answer = served.post(f"/deployments/{served.deployment(deployment)['id']}/create_flow_run", parameters={"request": request_})
    assert answer.status_code in (409, 422)
    assert word in answer.text


@pytest.mark.parametrize(
    ("deployment", "request_", "word"),
    [
        (EXPORT, {"source": "/nowhere", "to": "/tmp/out"}, "/nowhere: does not exist"),
        (EXPORT, {"source": str(CASE / "ckpt"), "to": "/tmp/out", "skip": ["logits"]}, "NAME=REASON"),
        (GATE, {"release": "/nowhere"}, "/nowhere: does not exist"),
        (DRILL, {"root": "/nowhere"}, "/nowhere: does not exist"),
        (DRILL, {"root": str(CASE), "level": "D1", "resume": "train:step"}, "is level D3, not D1"),
        (NEWEST, {"root": "/nowhere", "into": "/nowhere"}, "/nowhere: does not exist"),
        (PLAN, {"root": "/nowhere"}, "/nowhere: does not exist"),
    ],
)
def test_what_no_schema_can_tell_fails_the_run_with_the_command_lines_words(served, deployment, request_, word):
    run = served.run(deployment, **request_)
    assert run["state_type"] == "FAILED"
    assert word in run["state"]["message"]
    assert "Traceback" not in served.logs(run, word)
    assert not (served.place / "out").exists()


def test_a_request_in_the_apis_own_words_keeps_its_report_where_serve_was_told_to(served):
    gate = served.deployment("release%20gate/on-demand")
    asked = served.post(f"/deployments/{gate['id']}/create_flow_run", parameters={"request": {"release": str(CASE / "hf")}})
    run = served.wait(asked.raise_for_status().json()["id"])
    assert str(served.place / "kept here/gate-") in served.artifacts(run)["report"]
    assert not (served.place / "runs").exists()


def _second(served: Served, place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | QUICK | {"PREFECT_API_URL": served.api, "PREFECT_HOME": str(place / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "serve", *options]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=180, check=False)


def test_a_second_serve_does_not_take_over_the_firsts_deployments(served, tmp_path):
    before = served.deployment("export/on-demand")
    done = _second(served, tmp_path)
    assert done.returncode == 2
    assert "export/on-demand is run by another serve or worker" in done.stderr
    assert "--name" in done.stderr
    assert served.deployment("export/on-demand")["parameters"] == before["parameters"]
    with serving(tmp_path, "--name", "other", environment={"PREFECT_API_URL": served.api}) as other:
        assert other.deployment("export/on-demand-other")["parameters"]["request"]["runs"] == str(tmp_path / "runs")
        other.stop()
    assert (served.deployment("export/on-demand")["paused"], served.deployment("export/on-demand-other")["paused"]) == (False, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "4555"), "--port 4555: means nothing beside a server that runs already"),
        (("--name", "a b"), "--name a b: is no name"),
        (("--root", str(CASE), "--resume", "nope:thing"), "--resume nope:thing: no module named 'nope'"),
        (("--root", str(CASE), "--assets", "nope"), "--assets nope: is no folder"),
        (("--resume", "nope:thing"), "--resume nope:thing: needs --root"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_deployed(served, tmp_path, options, said):
    done = _second(served, tmp_path, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_it_stops_when_told_to_and_its_server_with_it(served):
    assert served.stop().endswith("stopped  schedules are paused until the next serve\n")
    assert served.process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.api}/health", timeout=5)


def test_a_killed_serve_leaves_no_server_on_its_port(tmp_path):
    with serving(tmp_path) as killed:
        killed.process.kill()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{killed.api}/health", timeout=5)
            except httpx.ConnectError:
                return
            except httpx.TransportError:
                pass  # it is on its way
            time.sleep(0.5)
    raise AssertionError("the server is still there")


def test_work_pools_are_offered_what_serve_offers(tmp_path):
    from flows.deployments import Watched, list_offers

    stored = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    offers = list_offers(tmp_path, Watched(tmp_path, tmp_path, None))
    named = {(f"{offer.flow.fn.__module__}:{offer.flow.fn.__name__}", offer.name, offer.at_once) for offer in offers}
    assert {(one["entrypoint"], one["name"], one.get("concurrency_limit", {}).get("limit")) for one in stored} == named
    crons = {offer.name: offer.cron for offer in offers if offer.cron}
    assert {one["name"]: one["schedules"][0]["cron"] for one in stored if "schedules" in one} == crons


def test_a_configured_server_that_does_not_answer_is_named(tmp_path):
    url = "http://127.0.0.1:9/api"
    environment = {**os.environ, "PREFECT_API_URL": url, "PREFECT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "serve", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"shardwright: {url}: the Prefect server does not answer (")
    assert "Traceback" not in done.stderr
