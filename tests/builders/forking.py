"""Runs exports, drills and retention in forks of one process that has everything imported, so that each takes a fraction of a second.

Run as `python -m tests.builders.forking`: one JSON order per line on standard input, one JSON answer per line on standard output.
`Forker` is the other end. An order may ask the child to kill itself at a step of the line, to be killed after some seconds, to run as
another user, under a file size limit, or to do something to the source at a step.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STEP_LOG = "steps.txt"


@dataclass(frozen=True)
class Ending:
    """How a child ended: `signal` that killed it or 0, the refusal's class and text, the steps it reached."""

    signal: int
    refusal: str
    message: str
    steps: tuple[str, ...]
    seconds: float


class Forker:
    """Starts the parent process and sends it orders. Use as a context manager."""

    def __enter__(self) -> "Forker":
        command = [sys.executable, "-m", "tests.builders.forking"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def drill(self, request: dict[str, object], log: Path, **order: object) -> Ending:
        """Drill in a child; orders as for `export`."""
        return self.export(request, log, flow="drill", **order)

    def retain(self, request: dict[str, object], log: Path, **order: object) -> Ending:
        """Thin a run out in a child; orders as for `export`."""
        return self.export(request, log, flow="retain", **order)

    def export(self, request: dict[str, object], log: Path, **order: object) -> Ending:
        """Export in a child; `log` is a folder for what it says.

        Orders: kill_at a step; kill_after seconds; kill_when_left: [folder, pattern, matches]; uid; file_nbytes; copy_at.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log.mkdir(parents=True, exist_ok=True)
        print(json.dumps({"request": request, "log": str(log), **order}), file=self._process.stdin, flush=True)
        content = json.loads(self._process.stdout.readline())
        return Ending(content["signal"], content["refusal"], content["message"], tuple(content["steps"]), content["seconds"])


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    _warm_up()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _warm_up() -> None:
    # One export before the forks: what is imported on first use is then there.
    import torch

    from flows.drill_requests import DrillRequest
    from flows.export import run_export
    from flows.requests import ExportRequest
    from flows.restore_drill import DrillFailedError, run_drill
    from flows.run import PlainRunner, Silent
    from tests.builders.dcp import save_alone

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        save_alone({"model": {"w": torch.arange(6.0).reshape(2, 3)}}, base / "ckpt")
        request = ExportRequest(source=base / "ckpt", to=base / "out", family="none", skip=["logits=none"], runs=base / "runs")
        run_export(request, PlainRunner(), Silent())
        with suppress(DrillFailedError):  # a model by itself
            run_drill(DrillRequest(root=base / "ckpt", runs=base / "runs"), PlainRunner())


def _run(order: dict) -> dict[str, object]:
    log = Path(order["log"])
    for name in (STEP_LOG, "refusal.json"):
        (log / name).unlink(missing_ok=True)
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _work(order, log)
    if order.get("kill_after") is not None:
        time.sleep(order["kill_after"])
    if order.get("kill_when_left"):
        _wait_until_left(*order["kill_when_left"], child)
    if order.keys() & {"kill_after", "kill_when_left"}:
        os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still its own
    _, status = os.waitpid(child, 0)
    refusal = json.loads((log / "refusal.json").read_text()) if (log / "refusal.json").exists() else ["", ""]
    steps = (log / STEP_LOG).read_text().splitlines() if (log / STEP_LOG).exists() else []
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"signal": killed, "refusal": refusal[0], "message": refusal[1], "steps": steps, "seconds": time.monotonic() - begun}


def _wait_until_left(folder: str, pattern: str, matches: int, child: int) -> None:
    # Returns when no more than so many entries are in the folder, or the child has ended (and is not reaped by asking).
    while sum(1 for _ in Path(folder).glob(pattern)) > matches and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.0002)


def _work(order: dict, log: Path) -> None:
    from flows.drill_requests import DrillRequest
    from flows.export import export_line
    from flows.requests import ExportRequest
    from flows.restore_drill import drill_line
    from flows.retention import RetainRequest, retain
    from flows.run import PlainRunner, RedVerdictError, Run
    from reports.errors import ReleaseError

    def reached(step: str) -> None:
        with (log / STEP_LOG).open("a") as file:
            file.write(step + "\n")
        if step == order.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if order.get("copy_at") and order["copy_at"][0] == step:
            shutil.copyfile(*order["copy_at"][1:])

    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if order.get("uid"):
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])
        if order.get("file_nbytes"):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_nbytes"], order["file_nbytes"]))
        kind = order.get("flow", "export")
        request_class, line = {
            "export": (ExportRequest, export_line),
            "drill": (DrillRequest, drill_line),
            "retain": (RetainRequest, lambda request, _: retain(request)),
        }[kind]
        request = request_class.model_validate(order["request"])
        run = Run.create(kind, request.runs, PlainRunner())
        run.reached = reached
        line(request, run)
        code = 0
    except (ReleaseError, RedVerdictError) as refusal:
        (log / "refusal.json").write_text(json.dumps([type(refusal).__name__, str(refusal)]))
    except BaseException as crash:
        (log / "refusal.json").write_text(json.dumps([f"CRASH {type(crash).__name__}", str(crash)]))
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
