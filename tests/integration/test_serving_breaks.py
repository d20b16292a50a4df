"""What breaks around a served run: it is cancelled, its process or its server dies; and what schedules and automations do.

One server, of its own process and on Postgres where that is installed; `shardwright serve` uses it through PREFECT_API_URL.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.databases import find_postgres, postgres
from tests.integration.served import CASE, PATIENCE, ROOT, Served, free_port, make_run, serving

pytestmark = pytest.mark.slow

ASKED = {"source": str(CASE / "ckpt"), "assets": str(CASE / "hf"), "skip": ["logits=tested elsewhere"]}


@dataclass
class Breakable:
    """A Prefect server that can be killed and started again on its port."""

    port: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.api}/health", timeout=5).raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        assert self.process is not None
        for process in (*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)):
            process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Iterator[str]:
    """A Postgres database's address; "" for Prefect's own SQLite file, where there is no Postgres."""
    programs = find_postgres()
    if programs is None:
        yield ""
        return
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders let no other user in
        Path(place).chmod(0o755)
        with postgres(programs, Path(place) / "postgres") as address:
            yield address


@pytest.fixture(scope="module")
def server(database, tmp_path_factory) -> Iterator[Breakable]:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"PREFECT_HOME": str(tmp_path_factory.mktemp("home")), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    if database:
        environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database
    running = Breakable(free_port(), environment)
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def served(server, tmp_path_factory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("served")
    make_run(place)
    options = ("--root", "run", "--evaluations", "evaluations", "--assets", str(CASE / "hf"))
    with serving(place, *options, environment={"PREFECT_API_URL": server.api}) as running:
        yield running
        running.stop()


def stages(served: Served) -> list[str]:
    return [path.name for path in served.place.glob(".*.shardwright-*")]


def waiting_run(served: Served, to: str) -> str:
    """A run that has written everything and waits for an approval."""
    run = served.ask("export/on-demand", **ASKED, to=str(served.place / to), approve=True)
    assert served.wait(run, {"PAUSED", "FAILED", "CRASHED"})["state_type"] == "PAUSED"
    assert len(stages(served)) == 1
    return run


def process_of(served: Served, run: str) -> psutil.Process:
    mine = psutil.Process(served.process.pid).children(recursive=True)
    return next(p for p in mine if p.environ().get("PREFECT__FLOW_RUN_ID", "").replace("-", "") == run.replace("-", ""))


def answer(served: Served, run: str, decision: str) -> None:
    state = served.get(f"/flow_runs/{run}")["state"]
    keyset = state["state_details"]["run_input_keyset"]
    stored = served.get(f"/flow_runs/{run}/input/{keyset['schema']}")
    assert "decision" in str(stored)
    given = {"decision": decision, "by": "Ada", "reason": "looks right"}
    served.post(f"/flow_runs/{run}/resume", run_input=given).raise_for_status()


def test_a_cancelled_run_leaves_nothing_behind(served):
    run = waiting_run(served, "cancelled")
    served.post(f"/flow_runs/{run}/set_state", state={"type": "CANCELLING"}).raise_for_status()
    over = served.wait(run)
    assert over["state_type"] == "CANCELLED"
    assert "nothing was published" in served.logs(over, "nothing was published")
    assert stages(served) == []
    assert not (served.place / "cancelled").exists()


def test_a_killed_run_says_how_to_go_on_and_does(served):
    run = waiting_run(served, "killed")
    process_of(served, run).send_signal(signal.SIGKILL)
    over = served.wait(run)
    assert over["state_type"] == "CRASHED"
    assert not (served.place / "killed").exists()
    assert len(stages(served)) == 1
    assert "goes on from" in served.logs(over, "goes on from")
    again = served.run("export/on-demand", **ASKED, to=str(served.place / "killed"))
    assert again["state_type"] == "COMPLETED"
    assert (served.place / "killed/shardwright.committed").is_file()
    assert stages(served) == []


def test_a_server_killed_and_started_again_does_not_harm_a_run(served, server):
    run = waiting_run(served, "outlived")
    server.kill()
    time.sleep(5)
    server.start()
    answer(served, run, "approve")
    over = served.wait(run)
    assert over["state_type"] == "COMPLETED"
    assert (served.place / "outlived/shardwright.committed").is_file()
    assert "Ada: looks right" in served.logs(over, "Ada: looks right")


def test_a_second_export_to_the_same_place_waits_for_the_first(served):
    first = waiting_run(served, "shared")
    second = served.ask("export/on-demand", **ASKED, to=str(served.place / "shared"), wait=True)
    served.wait(second, {"RUNNING"})
    time.sleep(10)
    assert served.get(f"/flow_runs/{second}")["state_type"] == "RUNNING"
    answer(served, first, "reject")
    assert served.wait(first)["state_type"] == "FAILED"
    assert served.wait(second)["state_type"] == "COMPLETED"
    assert (served.place / "shared/shardwright.committed").is_file()


def test_a_schedule_exports_a_new_checkpoint_once(served):
    offered = served.deployment("export%20newest/evaluation")
    route = f"/deployments/{offered['id']}/schedules"
    added = httpx.post(f"{served.api}{route}", json=[{"schedule": {"interval": 15}, "active": True}], timeout=60).raise_for_status().json()

    def done() -> list[dict]:
        wanted = {"deployment_id": {"any_": [offered["id"]]}, "state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}}
        return served.post("/flow_runs/filter", flow_runs=wanted, limit=50).json()

    deadline = time.monotonic() + PATIENCE
    while len(done()) < 3 and time.monotonic() < deadline:
        time.sleep(1)
    httpx.delete(f"{served.api}{route}/{added[0]['id']}", timeout=60).raise_for_status()
    assert {run["state_type"] for run in done()} == {"COMPLETED"}
    assert [path.name for path in (served.place / "evaluations").iterdir() if not path.name.startswith(".")] == ["step-3"]
    roots = [path for path in (served.place / "runs").glob("export-*") if "evaluations/step-3" in (path / "report.json").read_text()]
    assert len(roots) == 1


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """A web hook's other end."""
    heard: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    web = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}/drills", heard
    web.shutdown()


def test_the_documented_automation_tells_a_web_hook_of_a_failed_drill(served, server):
    empty = served.place / "empty"
    empty.mkdir()
    with listening() as (address, heard):
        example = [sys.executable, ROOT / "docs/automations/drill_failed.py", address]
        for _ in range(2):  # as often as one likes
            subprocess.run(example, env=server.environment | {"PREFECT_API_URL": server.api}, check=True, timeout=300)
        assert served.run("restore%20drill/on-demand", root=str(empty))["state_type"] == "FAILED"
        deadline = time.monotonic() + 120
        while not heard and time.monotonic() < deadline:
            time.sleep(0.5)
    assert ["drill empty" in one for one in heard] == [True]


@pytest.mark.skipif(find_postgres() is None, reason="no Postgres on this machine")
def test_the_runs_above_were_kept_in_postgres(database):
    assert database.startswith("postgresql")
