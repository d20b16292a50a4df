"""Runs `shardwright` commands in forks of one process that has everything imported and one embedded Prefect server for all of them.

A command started from nothing spends nearly all its time importing and starting that server. What a fork cannot show (how quickly help
appears, signals, a terminal, the embedded server itself) is tested with processes of their own.

Run as `python -m tests.builders.commanding SOCKET`: each connection to the socket is a command, one JSON order, answered by its exit code.
`CommandLine` is the other end; so is the program it writes, for what finds `shardwright` on the path.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # s
# What the commands import as they come to it.
COSTLY = (
    "flows.cli",
    "flows.export",
    "flows.gate",
    "flows.inspection",
    "flows.preview",
    "flows.restore_drill",
    "flows.retention",
    "flows.ledger",
    "great_expectations",
    "pandera.pandas",
    "transformers.models.llama.modeling_llama",
)
_PROGRAM = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from tests.builders.commanding import ask
variables = {{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}}
done = ask({address!r}, sys.argv[1:], os.getcwd(), variables)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
"""


def ask(address: str, command: list[str], cwd: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Have a command run to its end."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as wire:
        out, err = Path(folder) / "out", Path(folder) / "err"
        order = {"command": command, "cwd": cwd, "variables": variables, "out": str(out), "err": str(err)}
        wire.connect(address)
        with wire.makefile("rw") as lines:
            print(json.dumps(order), file=lines, flush=True)
            code = int(lines.readline())
        return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


class CommandLine:
    """Starts the parent process and sends it commands. Use as a context manager, which takes half a minute to begin."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"{self._folder.name}/socket"

    def __enter__(self) -> "CommandLine":
        kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.builders.commanding", self._address],
            cwd=ROOT,
            env=kept | {"PREFECT_HOME": f"{self._folder.name}/home"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "ready\n", said + self._process.communicate()[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)  # closes its standard input, which ends it
        self._folder.cleanup()

    def run(self, *arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command; a traceback is never right."""
        done = ask(self._address, [str(argument) for argument in arguments], str(cwd or Path.cwd()), variables)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done

    def write_program(self, path: Path) -> None:
        """Write an executable that runs its arguments as a command, in its working folder and environment."""
        path.write_text(_PROGRAM.format(python=sys.executable, root=str(ROOT), address=self._address))
        path.chmod(0o755)


def _serve(address: str) -> None:
    from flows.server import await_prefect, prepare_prefect

    prepare_prefect()
    for module in COSTLY:
        import_module(module)
    await_prefect()
    gc.freeze()  # or each child's first collection copies every page
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:  # which only its end makes readable
            wire, _ = door.accept()
            with wire, wire.makefile("rw") as lines:
                order = json.loads(lines.readline())
                child = os.fork()
                if child == 0:
                    _become(order)
                _, status = os.waitpid(child, 0)
                print(os.waitstatus_to_exitcode(status), file=lines, flush=True)


def _become(order: dict) -> NoReturn:
    from flows.cli import main

    code = 1
    try:
        signal.alarm(PATIENCE)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT, 0o600), stream)
        os.chdir(order["cwd"])
        os.environ |= order["variables"]
        sys.argv = ["shardwright", *order["command"]]
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as at a command's end; taking apart what the parent imported would take seconds and show nothing
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
