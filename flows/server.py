"""Prefect's server for one command: started early and in the background, gone when the command is.

A command calls `prepare_prefect()` first thing, before Prefect is imported, goes on importing, and calls `await_prefect()` before its
first flow. The server runs flows/server_process.py in a process of its own. The listening socket is made here and inherited, so no port
is ever guessed; the child tells through a socket pair that it is ready, and learns through it that we are gone, whatever killed us.

Where the user has configured a server (PREFECT_API_URL in the environment, a .env file, a prefect.toml, a pyproject.toml or the active
profile), that one is used and nothing is started.

The embedded server keeps runs, logs and artifacts in PREFECT_HOME, for a later `prefect server start` to show; it runs no schedules and
no automations.

Source: prefect 3.9, prefect/server/api/server.py (SubprocessASGIServer) and prefect/settings.
"""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO

from reports.errors import RequestError, ServerError

READY = b"ready"
START_SECONDS = 120.0  # a new database on a busy machine takes 25
STOP_SECONDS = 10.0

# For every command, whichever server it uses. What the user has set wins.
QUIET: Mapping[str, str] = MappingProxyType(
    {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the command prints its own summary; the log is kept by the server
    }
)
# For the embedded server's process: nobody schedules, watches or reacts to one command's run.
ONE_SHOT: Mapping[str, str] = MappingProxyType(
    {
        "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED": "false",
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",  # and with it the vacuum of old events
        "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        # Block types are for the UI of a lasting server, which registers its own: only if no memo says that it was done here.
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
        "PYDANTIC_DISABLE_PLUGINS": "1",  # the server's models need none, and the search for them is a tenth of a second
    }
)
# What the first flow, task and table would import; here while the server starts.
_FIRST_FLOW = (
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.utilities.visualization",
    "fastapi.encoders",
    "pandera.backends.pandas.builtin_checks",
)
_API_URL = "PREFECT_API_URL"
_PROCESS = Path(__file__).with_name("server_process.py")


@dataclass(slots=True)
class _Server:
    # The embedded server. `wire` is our end of the socket pair; `owner` the process that started it, since forks inherit this object.
    process: subprocess.Popen[bytes]
    wire: socket.socket
    log: IO[bytes]
    owner: int
    is_ready: bool = False


_running: list[_Server] = []  # at most one


def prepare_prefect() -> None:
    """Set what Prefect reads when it is imported, and start the embedded server unless the user has configured one. Returns at once.

    Raises:
        ServerError: there is no place for the embedded server's runs.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if _running or is_configured():
        return
    server, url = _start()
    _running.append(server)
    os.environ[_API_URL] = url
    _skip_proxy()
    if "prefect" in sys.modules:  # its settings are already read
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    atexit.register(stop_prefect)  # before Prefect registers its own: exit handlers run last in, first out, so its last logs arrive


def await_prefect(timeout_seconds: float = START_SECONDS) -> None:
    """Wait until the embedded server answers, or see that the user's own one does.

    Args:
        timeout_seconds: how long to wait for the embedded one.

    Raises:
        ServerError: the embedded server ended, or did not answer in time (the message has the last lines of its log); or the user's own
            server cannot be reached.
    """
    if not _running:
        ask_health()
    for server in _running:
        if not server.is_ready:
            for module in _FIRST_FLOW:
                import_module(module)
            _await_ready(server, timeout_seconds)
        # Nobody listens for heartbeats here, and the thread that sends them holds up the end of a flow by up to a second.
        from prefect.settings import get_current_settings

        get_current_settings().flows.heartbeat_frequency = None


def stop_prefect() -> None:
    """Stop the embedded server, after it has written what it holds. Does nothing in a forked process, or when none runs."""
    while _running:
        server = _running.pop()
        server_is_ours = server.owner == os.getpid()
        if server_is_ours:
            _hang_up(server.wire)
            try:
                server.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        server.wire.close()
        server.log.close()
        if server_is_ours:
            os.environ.pop(_API_URL, None)


def has_terminal_to_ask() -> bool:
    """Return whether a command that asks somebody asks at the terminal; else in the page of the server that is configured.

    To be asked before `prepare_prefect`, which names the embedded server: that has no page.

    Returns:
        True when standard input is a terminal.

    Raises:
        RequestError: neither is there.
    """
    if sys.stdin is not None and sys.stdin.isatty():
        return True
    if not is_configured():
        remedy = "Run it at a terminal, from the page of shardwright serve, or without --approve."
        raise RequestError("has nobody to ask: standard input is no terminal", where="--approve", remedy=remedy)
    return False


def ask_health() -> None:
    """Ask the user's own server whether it answers.

    Raises:
        ServerError: it does not; the message names it.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():  # asking would make Prefect start a server of its own
        raise ServerError("no Prefect server is prepared.", remedy="Call prepare_prefect() first.")
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None:
        raise ServerError(
            f"the Prefect server does not answer ({type(error).__name__}: {error}).",
            where=str(PREFECT_API_URL.value()),
            remedy="Start it, correct PREFECT_API_URL, or unset it to use the embedded server.",
        )


def is_configured() -> bool:
    """Return whether the user has configured a Prefect server.

    Prefect itself is asked when a file exists that could say so (that import takes over a second); else the environment tells.

    Returns:
        True when PREFECT_API_URL has a value.
    """
    if os.environ.get(_API_URL):
        return True
    if not any(_mentions_prefect(path, word) for path, word in _settings_files()):
        return False
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


def _settings_files() -> list[tuple[Path, str]]:
    # Where Prefect looks for settings, with a word each holds if it sets any. Source: prefect/settings/sources.py.
    home = _home()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    return [(Path(".env"), "prefect"), (Path("prefect.toml"), ""), (Path("pyproject.toml"), "tool.prefect"), (profiles, "")]


def _home() -> Path:
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()


def _make_home() -> None:
    # With its parents, which Prefect does not make; it warns instead, and the server's end is hard to read.
    try:
        _home().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(
            f"the embedded Prefect server cannot keep its runs there: {error.strerror}.",
            where=str(_home()),
            remedy="Set PREFECT_HOME to a folder that can be written, or name a running server in PREFECT_API_URL.",
        ) from error


def _mentions_prefect(path: Path, word: str) -> bool:
    try:
        return word in path.read_text(encoding="utf-8", errors="replace").lower()
    except (FileNotFoundError, NotADirectoryError):
        return False


def _start() -> tuple[_Server, str]:
    _make_home()
    log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the server)
    ours, theirs = socket.socketpair()
    with theirs, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        environment = {**os.environ, **{name: os.environ.get(name, value) for name, value in ONE_SHOT.items()}}
        process = subprocess.Popen(
            # -P: this file's folder must not come before the standard library and site-packages
            [sys.executable, "-P", str(_PROCESS), str(listener.fileno()), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(listener.fileno(), theirs.fileno()),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the command: the server must live to hear how the run ended
        )
    return _Server(process, ours, log, os.getpid()), f"http://127.0.0.1:{port}/api"


def _await_ready(server: _Server, timeout_seconds: float) -> None:
    server.wire.settimeout(timeout_seconds)
    try:
        server.is_ready = server.wire.recv(len(READY)) == READY
        what = "" if server.is_ready else f"ended with code {server.process.wait(STOP_SECONDS)}"
    except TimeoutError:
        what = f"has not answered for {timeout_seconds:.0f} s"
    if what:
        tail = _tail(server.log)
        stop_prefect()
        raise ServerError(
            f"the embedded Prefect server {what}. Its last words: {tail or 'none'}.",
            where=os.environ.get("PREFECT_HOME") or "~/.prefect",
            remedy="Try again, set PREFECT_HOME to a folder on a local disk, or name a running server in PREFECT_API_URL.",
        )


def _tail(log: IO[bytes], lines: int = 5) -> str:
    log.seek(0)
    return " | ".join(log.read().decode("utf-8", "replace").strip().splitlines()[-lines:])


def _hang_up(wire: socket.socket) -> None:
    try:
        wire.shutdown(socket.SHUT_RDWR)  # reaches the server even while a forked process holds a copy
    except OSError:
        return  # the server is gone already


def _skip_proxy() -> None:
    # A proxy in the environment is not for our own machine.
    for name in ("NO_PROXY", "no_proxy"):
        hosts = os.environ.get(name, "")
        if "127.0.0.1" not in hosts.split(","):
            os.environ[name] = f"{hosts},127.0.0.1".lstrip(",")
