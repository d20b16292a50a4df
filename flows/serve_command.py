"""`shardwright serve`."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from flows.line import GREEN, default_runs
from flows.options import AssetsOption, RunsOption


def serve(
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
    runs: RunsOption = None,
) -> int:
    """Open Prefect's page with exports, gates and drills as forms, and run what is asked there or scheduled. Ends with Ctrl-C.

    A server that is named in PREFECT_API_URL is used instead of a new one. Runs execute on this machine.

    Example: shardwright serve --root runs/llama --evaluations evals/ --assets hf/
    """
    from flows.lasting_server import lasting_server
    from flows.watching import look_after, watched_of

    watched = watched_of(root, evaluations, assets, resume)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with lasting_server(port) as page:
        look_after((runs or default_runs()).absolute(), watched, page)
    return GREEN
