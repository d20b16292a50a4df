"""The embedded Prefect server: it comes up, keeps what it heard, and goes with the command, however that ends."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
START = """
import sys
import flows.server as server
server.prepare_prefect()
print(server._running[0].process.pid if server._running else 0, flush=True)
"""
FLOW = (
    START
    + """
from prefect import flow, task

@task
def one(n):
    return n + 1

@flow
def tiny():
    return sum(one(n) for n in range(2))

server.await_prefect()
print(tiny(), flush=True)
"""
)
SLEEP = (
    START
    + """
import time
from prefect import flow

@flow
def slow():
    print("in the flow", flush=True)
    time.sleep(120)

server.await_prefect()
slow()
"""
)


def environment(home, **more):
    """This environment without any Prefect setting, plus `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**kept, "PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT), **more}


def command(code, home, cwd, **more):
    """Start Python on `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=cwd, env=environment(home, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid, seconds=20.0):
    """Wait for a process to end; return whether it did."""
    until = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


def count(home, table):
    """Rows of a table in Prefect's database."""
    with sqlite3.connect(home / "prefect.db") as database:
        return database.execute(f"select count(*) from {table}").fetchone()[0]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose database exists, so that a server starts quickly."""
    home = tmp_path_factory.mktemp("prefect-home")
    out, err = command(FLOW, home, home).communicate(timeout=120)
    assert out.splitlines()[1:] == ["3"], err
    return home


def test_a_flow_runs_quietly_and_its_record_is_kept(home, tmp_path):
    before = {table: count(home, table) for table in ("flow_run", "task_run", "log")}
    run = command(FLOW, home, tmp_path)
    out, err = run.communicate(timeout=120)
    server, result = out.split()
    assert (run.returncode, result, err) == (0, "3", "")
    assert not is_alive(int(server))
    assert count(home, "flow_run") == before["flow_run"] + 1
    assert count(home, "task_run") == before["task_run"] + 2
    assert count(home, "log") > before["log"]
    with sqlite3.connect(home / "prefect.db") as database:
        states = {state for (state,) in database.execute("select state_type from task_run union select state_type from flow_run")}
    assert states == {"COMPLETED"}


def test_no_block_type_is_registered_and_none_is_remembered_as_if_it_were(home):
    # several servers that register them in one new database fail on its unique names; a lasting server still does it later
    assert count(home, "block_type") == 0
    assert not (home / "memo_store.toml").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_a_command_that_is_stopped_in_a_flow(home, tmp_path, number):
    run = command(SLEEP, home, tmp_path)
    server = int(run.stdout.readline())
    assert run.stdout.readline() == "in the flow\n"
    assert is_alive(server)
    run.send_signal(number)
    run.communicate(timeout=30)
    assert wait_until_gone(server)


def test_no_server_outlives_a_command_that_is_killed_while_it_starts(home, tmp_path):
    run = command(START + "import time; time.sleep(120)", home, tmp_path)
    server = int(run.stdout.readline())
    run.kill()
    run.communicate(timeout=30)
    assert wait_until_gone(server)


def test_a_command_that_never_runs_a_flow_leaves_no_server(home, tmp_path):
    run = command(START + "sys.exit(2)", home, tmp_path)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (2, "")
    assert not is_alive(int(out))


def test_a_forked_process_keeps_no_server_alive_and_stops_none(home, tmp_path):
    fork = """
import os, time
from prefect import flow
server.await_prefect()
child = os.fork()
if child == 0:
    server.stop_prefect()
    os.close(1); os.close(2)
    time.sleep(60)
    os._exit(0)
time.sleep(1)

@flow
def after():
    return 4

print(after(), child, flush=True)
"""
    run = command(START + fork, home, tmp_path)
    out, err = run.communicate(timeout=60)
    server, result, child = out.split()
    assert (result, err) == ("4", "")
    try:
        assert is_alive(int(child))
        assert not is_alive(int(server))
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("is_new", [True, False])
def test_six_commands_at_once_share_a_home_without_noise(home, tmp_path, is_new):
    shared = tmp_path / "new-home" if is_new else home
    before = 0 if is_new else count(shared, "flow_run")
    runs = [command(FLOW, shared, tmp_path) for _ in range(6)]
    said = [run.communicate(timeout=300) for run in runs]
    assert [(out.splitlines()[1:], err) for out, err in said] == [(["3"], "")] * 6
    assert count(shared, "flow_run") == before + 6


def test_a_server_that_cannot_start_is_named_with_its_last_words(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "prefect.db").write_bytes(b"this is no database, but long enough to look like one" * 100)
    tell = """
from reports.errors import ServerError
try:
    server.await_prefect()
except ServerError as error:
    print(error)
"""
    out, err = command(START + tell, home, tmp_path).communicate(timeout=120)
    server, message = out.split("\n", 1)
    assert err == ""
    assert message.startswith(f"{home}: the embedded Prefect server ended with code ")
    assert "file is not a database" in message
    assert not is_alive(int(server))


def test_a_home_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    tell = """
import flows.server as server
from reports.errors import ServerError
try:
    server.prepare_prefect()
except ServerError as error:
    print(error)
"""
    out, err = command(tell, tmp_path / "file/home", tmp_path).communicate(timeout=120)
    assert err == ""
    assert out.startswith(f"{tmp_path}/file/home: the embedded Prefect server cannot keep its runs there: Not a directory.")


def test_a_new_home_is_made_with_its_parents_and_without_a_word(tmp_path):
    out, err = command(FLOW, tmp_path / "no/such/home", tmp_path).communicate(timeout=120)
    assert (out.split()[-1], err) == ("3", "")
    assert (tmp_path / "no/such/home/prefect.db").exists()


def test_a_server_that_does_not_answer_in_time_is_named_and_ended(home, tmp_path):
    tell = """
import os, signal
from reports.errors import ServerError
os.kill(server._running[0].process.pid, signal.SIGSTOP)
server.STOP_SECONDS = 1.0
try:
    server.await_prefect(timeout_seconds=0.05)
except ServerError as error:
    print(error)
print(server._running)
"""
    out, err = command(START + tell, home, tmp_path).communicate(timeout=120)
    pid, message, left = out.splitlines()
    assert (err, left) == ("", "[]")
    assert "the embedded Prefect server has not answered for 0 s" in message
    assert not is_alive(int(pid))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (None, ""),
        (".env", "PREFECT_API_URL=http://user.example/api\n"),
        ("prefect.toml", '[api]\nurl = "http://user.example/api"\n'),
        ("pyproject.toml", '[tool.prefect.api]\nurl = "http://user.example/api"\n'),
        ("home/profiles.toml", 'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://user.example/api"\n'),
    ],
)
def test_a_server_the_user_configured_is_used_and_none_is_started(tmp_path, file, text):
    home = tmp_path / "home"
    home.mkdir()
    more = {}
    if file is None:
        more["PREFECT_API_URL"] = "http://user.example/api"
    else:
        (tmp_path / file).write_text(text)
    ask = "from prefect.settings import PREFECT_API_URL\nprint(PREFECT_API_URL.value())"
    out, err = command(START + ask, home, tmp_path, **more).communicate(timeout=60)
    assert out.split() == ["0", "http://user.example/api"], err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".env", "PREFECT_LOGGING_LEVEL=INFO\nOTHER=1\n"),
        ("pyproject.toml", '[tool.prefect.logging]\nlevel = "INFO"\n'),
        ("pyproject.toml", '[project]\nname = "x"\n'),
        ("home/profiles.toml", 'active = "local"\n[profiles.local]\n[profiles.other]\nPREFECT_API_URL = "http://other.example/api"\n'),
    ],
)
def test_settings_that_name_no_server_keep_the_embedded_one(home, tmp_path, file, text):
    (tmp_path / "home").mkdir()
    (tmp_path / file).write_text(text)
    ask = "from prefect.settings import PREFECT_API_URL\nprint(PREFECT_API_URL.value())"
    out, err = command(START + ask, tmp_path / "home", tmp_path).communicate(timeout=60)
    server, url = out.split()
    assert int(server) > 0, err
    assert url.startswith("http://127.0.0.1:")
    assert not is_alive(int(server))


def test_a_configured_server_that_does_not_answer_is_named(tmp_path):
    tell = """
from reports.errors import ServerError
try:
    server.await_prefect()
except ServerError as error:
    print(error)
"""
    url = "http://127.0.0.1:9/api"
    out, err = command(START + tell, tmp_path, tmp_path, PREFECT_API_URL=url).communicate(timeout=120)
    assert err == ""
    assert out.startswith(f"0\n{url}: the Prefect server does not answer (")
    assert "unset it to use the embedded server" in out


def test_a_proxy_in_the_environment_is_not_asked_for_our_own_machine(home, tmp_path):
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    before = count(home, "task_run")
    out, err = command(FLOW, home, tmp_path, **dead, NO_PROXY="intranet.example").communicate(timeout=120)
    assert (out.split()[1:], err) == (["3"], "")
    assert count(home, "task_run") == before + 2


def test_telemetry_is_off_and_the_console_is_quiet_unless_the_user_says_otherwise(home, tmp_path):
    ask = """
import os
print(os.environ["DO_NOT_TRACK"], os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"], os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"])
"""
    out, _ = command(START + ask, home, tmp_path).communicate(timeout=60)
    assert out.split()[1:] == ["1", "false", "CRITICAL"]
    out, _ = command(START + ask, home, tmp_path, PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL="INFO").communicate(timeout=60)
    assert out.split()[1:] == ["1", "false", "INFO"]
