"""A running `shardwright serve`, and how tests ask it for runs."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.builders.released import GOLDEN

ROOT = Path(__file__).parents[2]
CASE = GOLDEN / "accelerate_llama"
COMMAND = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flows.cli import main; main()"
PATIENCE = 300.0
QUICK = {"PREFECT_RUNNER_POLL_FREQUENCY": "2"}  # s; asked for every ten by default, of which a test would wait for five
OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass
class Served:
    """Its process, the address of its API, and its working folder."""

    process: subprocess.Popen[str]
    api: str
    place: Path

    @property
    def page(self) -> str:
        return self.api.removesuffix("/api")

    def post(self, route: str, **body: object) -> httpx.Response:
        return self._ask("POST", route, body)

    def get(self, route: str) -> dict:
        return self._ask("GET", route, None).raise_for_status().json()

    def _ask(self, method: str, route: str, body: dict[str, object] | None) -> httpx.Response:
        # 503 is Prefect's "ask again": two of its services wrote to SQLite at once. Its own clients do so five times.
        deadline = time.monotonic() + 60
        while True:
            answer = httpx.request(method, f"{self.api}{route}", json=body, timeout=60)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                return answer
            time.sleep(1)

    def deployment(self, name: str) -> dict:
        return self.get(f"/deployments/name/{name}")

    def ask(self, name: str, **request: object) -> str:
        """Ask for a run and return its id."""
        offered = self.deployment(name)
        parameters = {"request": offered["parameters"].get("request", {}) | request}
        asked = self.post(f"/deployments/{offered['id']}/create_flow_run", parameters=parameters, state={"type": "SCHEDULED"})
        return asked.raise_for_status().json()["id"]

    def wait(self, run: str, states: frozenset[str] | set[str] = frozenset(OVER)) -> dict:
        """Wait until a run is in one of the states, and return it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self.get(f"/flow_runs/{run}")
            if found["state_type"] in states:
                return found
            time.sleep(1)
        raise AssertionError(f"{run} is {found['state_type']} after {PATIENCE} s")

    def run(self, name: str, **request: object) -> dict:
        """Ask for a run, wait until it is over, and return it."""
        return self.wait(self.ask(name, **request))

    def artifacts(self, run: dict) -> dict[str, str]:
        found = self.post("/artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}}).json()
        return {artifact["key"]: str(artifact["data"]) for artifact in found}

    def logs(self, run: dict, wanted: str) -> str:
        """A run's log, once it holds a text: it arrives in batches, a hook's after the run is over."""
        deadline = time.monotonic() + 60
        while True:
            found = self.post("/logs/filter", logs={"flow_run_id": {"any_": [run["id"]]}}).json()
            told = "\n".join(line["message"] for line in found)
            if wanted in told or time.monotonic() > deadline:
                return told
            time.sleep(0.5)

    def stop(self) -> str:
        """Tell it to stop, wait until it has, and return what it said since it was ready."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=120)[0]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def make_run(place: Path) -> None:
    """Write a training run with one complete step to place/run."""
    shutil.copytree(CASE / "ckpt", place / "run/step-3")


@contextmanager
def serving(place: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Start `shardwright serve` in `place`, wait until it answers, and end it with the block if it has not ended yet."""
    configured = (environment or {}).get("PREFECT_API_URL")
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", *([] if configured else ["--port", str(port)]), *options],
        cwd=place,
        env=inherited | QUICK | {"PREFECT_HOME": str(place / "home")} | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        while not said or not said[-1].startswith("stop "):
            line = process.stdout.readline()
            assert line, f"it ended: {said}"
            said.append(line)
        page = (configured or f"http://127.0.0.1:{port}/api").removesuffix("/api")
        assert f"open     {page}\n" in said
        yield Served(process, f"{page}/api", place)
    finally:
        if process.poll() is None:
            process.kill()
