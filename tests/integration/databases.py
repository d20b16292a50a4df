"""A Postgres of the tests' own, from the system's packages, in a folder and on a free port."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.served import free_port

_USER = "postgres"


def find_postgres() -> Path | None:
    """Where the server's programs lie; None where they are not installed, or nobody may run them (it refuses to run as root)."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = str(programs[-1]) if programs else shutil.which("initdb")
    if found is None or (os.geteuid() == 0 and _USER not in {user.pw_name for user in pwd.getpwall()}):
        return None
    return Path(found).parent


@contextmanager
def postgres(programs: Path, folder: Path) -> Iterator[str]:
    """Run a server with an empty database; yields its address as Prefect takes it."""
    user = _USER if os.geteuid() == 0 else None
    folder.mkdir()
    if user:
        shutil.chown(folder, user)
    port = free_port()

    def call(program: str, *arguments: str) -> None:
        subprocess.run([programs / program, *arguments], user=user, cwd="/", check=True, capture_output=True, timeout=120)

    data, options = str(folder / "data"), f"-h 127.0.0.1 -p {port} -k {folder}"
    call("initdb", "-D", data, "-U", "prefect", "-A", "trust")
    # Its log goes to a file: pg_ctl's child would keep our pipe open.
    call("pg_ctl", "-D", data, "-l", str(folder / "log"), "-o", options, "-w", "start")
    try:
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
