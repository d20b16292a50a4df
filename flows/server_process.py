"""The embedded Prefect server's process. Run as a file by flows/server.py; imports nothing of this product.

Arguments: the file descriptor of a listening socket, that of a socket pair's end, and the process id of whoever started it. It says
`ready` on the pair when it serves, and stops when the pair closes or its parent is no more.
"""

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

READY = b"ready"
GRACE_SECONDS = 8.0  # to write what is held; then it ends the hard way
# What a flow's run asks for. The other routes, deployments and blocks and work pools, would take half a second to build.
SERVED = frozenset(
    {"", "/admin", "/artifacts", "/csrf-token", "/events", "/flow_run_states", "/flow_runs", "/flows", "/logs", "/task_runs"}
)
_POLL_SECONDS = 1.0
_LOCK = "shardwright-server.lock"


def main(listener_fd: int, wire_fd: int, parent: int) -> None:
    """Serve until the parent hangs up.

    Args:
        listener_fd: a listening TCP socket.
        wire_fd: our end of the socket pair.
        parent: the process id that must stay our parent.
    """
    wire = socket.socket(fileno=wire_fd)
    is_over, is_at_work = threading.Event(), threading.Event()
    threading.Thread(target=_watch, args=(wire, parent, is_over, is_at_work), daemon=True).start()
    os.environ.pop("PREFECT_API_URL", None)
    gc.disable()  # the imports make a million objects that stay: collecting meanwhile costs a tenth of the start
    import uvicorn
    from prefect.server.api import server as api

    api.API_ROUTERS = tuple(r for r in api.API_ROUTERS if r.prefix in SERVED)  # type: ignore[assignment]  # a tuple of another length
    app = api.create_app(ephemeral=True)
    is_at_work.set()
    asyncio.run(_migrate())
    gc.freeze()
    gc.enable()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                await _warm_up(app)
                wire.send(READY)

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or is_over.is_set()

    config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    server = Server(config)
    server.run(sockets=[socket.socket(fileno=listener_fd)])
    # All is written. To free a million objects one by one takes a tenth of a second, while the command waits.
    os._exit(0 if server.started else 3)


async def _migrate() -> None:
    # Two commands on one new home: the second waits for the first's tables.
    from filelock import FileLock
    from prefect.server.database import provide_database_interface
    from prefect.settings import PREFECT_HOME

    home: Path = PREFECT_HOME.value()
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / _LOCK):
        await provide_database_interface().create_db()


async def _warm_up(app: "FastAPI") -> None:
    # The first request builds the routes, the first query the object mappings: a second that passes while our parent still imports.
    from httpx import ASGITransport, AsyncClient

    async with AsyncClient(transport=ASGITransport(app), base_url="http://embedded") as client:
        await client.get("/api/admin/version")
        await client.post("/api/flow_runs/count", json={})


def _watch(wire: socket.socket, parent: int, is_over: threading.Event, is_at_work: threading.Event) -> None:
    wire.settimeout(_POLL_SECONDS)
    while os.getppid() == parent:
        try:
            if not wire.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    is_over.set()
    if is_at_work.is_set():
        time.sleep(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
