"""A Prefect server with its page, on a port of the user's choice, that lives as long as `shardwright serve`.

Where the user has configured a server (PREFECT_API_URL), that one is used and nothing is started.

Source: prefect 3.9. `prefect server start --port` alone leaves the page calling port 4200: the server's own settings must name the port.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flows.server import QUIET, ask_health, is_configured
from reports.errors import RequestError, ServerError

HOST = "127.0.0.1"
START_SECONDS = 180.0  # a new database on a busy machine
STOP_SECONDS = 15.0
_POLL_SECONDS = 0.2
# `python -m prefect`, which Linux interrupts when its parent dies (PR_SET_PDEATHSIG): of us killed, it would stay on the port.
_PREFECT = """
import ctypes, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGINT)
runpy.run_module("prefect", run_name="__main__", alter_sys=True)
"""


@contextmanager
def lasting_server(port: int, *, is_chosen: bool) -> Iterator[str]:
    """Run a server as long as the block does.

    Args:
        port: where it listens, on this machine only.
        is_chosen: whether somebody chose the port, which means nothing beside a configured server.

    Yields:
        The address of its page.

    Raises:
        RequestError: the port is taken, or was chosen beside a configured server.
        ServerError: the server ended, or did not answer in time; the user's own one does not answer.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if is_configured():
        if is_chosen:
            remedy = "Leave it out, or unset PREFECT_API_URL to start a server."
            raise RequestError("means nothing beside a server that runs already", where=f"--port {port}", remedy=remedy)
        ask_health()
        yield os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
        return
    _refuse_taken(port)
    process = subprocess.Popen(
        [sys.executable, "-c", _PREFECT, "server", "start", "--host", HOST, "--port", str(port)],
        env={**os.environ, "PREFECT_SERVER_API_PORT": str(port), "PREFECT_SERVER_API_HOST": HOST},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us: flows that end must still reach their server
    )
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    try:
        _await_port(process, port)
        yield f"http://{HOST}:{port}"
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        _stop(process)


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            remedy = "Choose another --port, or name the server that runs there in PREFECT_API_URL."
            raise RequestError(f"is taken: {error.strerror}", where=f"--port {port}", remedy=remedy) from error


def _await_port(process: subprocess.Popen[bytes], port: int) -> None:
    from prefect.client.orchestration import get_client
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise ServerError(f"the Prefect server ended with code {code}.", where=f"port {port}", remedy="Look at PREFECT_HOME.")
        with get_client(sync_client=True) as client:
            if client.api_healthcheck() is None:
                return
        time.sleep(_POLL_SECONDS)
    raise ServerError(f"the Prefect server has not answered for {START_SECONDS:.0f} s.", where=f"port {port}", remedy="Try again.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGINT: a SIGTERM was seen to leave it running.
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
