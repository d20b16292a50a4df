"""What `shardwright serve` does once its server answers: deploy what is offered, and run what is asked for."""

import asyncio
from pathlib import Path

from prefect.exceptions import TerminationSignal
from prefect.runner import Runner

from flows.deployments import Watched, deploy, list_offers
from flows.drill_requests import DrillRequest
from reports.errors import RequestError
from reports.paths import real_path
from tasks.engine.formats.readers import check_folder


def watched_of(root: Path | None, evaluations: Path | None, assets: Path | None, resume: str) -> Watched | None:
    """Return the training run to look after.

    Args:
        root: its root, or None.
        evaluations: where its newest checkpoint is exported to, or None.
        assets: folder of config and tokenizer, or None.
        resume: the training step that drills continue with, or "".

    Returns:
        The run with absolute paths, None without a root.

    Raises:
        RequestError: an option that means nothing without --root, or a path inside it.
        FormatError: the root or the assets are not there.
    """
    if root is None:
        for option, value in (("--evaluations", evaluations), ("--assets", assets), ("--resume", resume)):
            if value:
                raise RequestError("needs --root", where=f"{option} {value}", remedy="Name the training run to look after.")
        return None
    DrillRequest(root=root, resume=resume)  # refuses what no drill would take
    for folder in (root, assets):
        if folder is not None:
            check_folder(folder)
    if evaluations is not None and real_path(evaluations).is_relative_to(real_path(root)):
        raise RequestError("lies inside the run", where=f"--evaluations {evaluations}", remedy="Choose a folder outside of --root.")
    return Watched(root.absolute(), evaluations.absolute() if evaluations else None, assets.absolute() if assets else None, resume)


def look_after(runs: Path, watched: Watched | None, page: str) -> None:
    """Deploy, say what to open, and run until interrupted.

    Args:
        runs: where run folders go.
        watched: a training run to look after, or None.
        page: the address of the server's page.
    """
    offers = list_offers(runs, watched)
    runner = Runner(name="shardwright")
    for offer in offers:
        runner.add_deployment(deploy(offer))
    print(f"open     {page}")
    for offer in offers:
        print(f"offers   {offer.flow.name}/{offer.name}{f', scheduled {offer.cron!r}' if offer.cron else ''}")
    print("stop     Ctrl-C", flush=True)
    try:
        asyncio.run(runner.start())
    except (KeyboardInterrupt, TerminationSignal):
        print("stopped  schedules are paused until the next serve")
