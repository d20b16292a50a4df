"""`shardwright serve`."""

import faulthandler
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from flows.line import GREEN
from flows.options import AssetsOption, RunsOption, is_typed
from flows.requests import RUNS_VARIABLE, default_runs

END_SECONDS = 30.0  # from the server's end to the process's; then it ends the hard way, and shows where it hung


def serve(
    context: typer.Context,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page, on this machine only.")] = 4200,
    root: Annotated[
        Path | None, typer.Option(help="A training run's root to look after: drilled every night and every week.", show_default=False)
    ] = None,
    evaluations: Annotated[
        Path | None,
        typer.Option(help="Folder that the newest complete checkpoint of --root is exported to, every hour.", show_default=False),
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="The training step that the weekly drill continues with.", show_default=False)
    ] = "",
    assets: AssetsOption = None,
    name: Annotated[str, typer.Option(help="Ends the deployments' names: for a second serve on the same server.", show_default=False)] = "",
    runs: RunsOption = None,
) -> int:
    """Open Prefect's page with exports, gates and drills as forms, and run what is asked there or scheduled. Ends with Ctrl-C.

    A server that is named in PREFECT_API_URL is used instead of a new one. Runs execute on this machine; relative paths in a form begin
    in the folder that serve was started in.

    Example: shardwright serve --root runs/llama --evaluations evals/ --assets hf/
    """
    from flows.deployments import list_offers
    from flows.lasting_server import lasting_server
    from flows.watching import look_after, watched_of

    watched = watched_of(root, evaluations, assets, resume)
    kept = (runs or default_runs()).absolute()
    os.environ[RUNS_VARIABLE] = str(kept)  # for runs that the API asks for in other words than the deployment's
    offers = list_offers(kept, watched, name)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with lasting_server(port, is_chosen=is_typed(context, "port")) as page:
            look_after(offers, page)
    finally:  # a thread of Prefect's was once seen to hold up the end for ever
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
    return GREEN
