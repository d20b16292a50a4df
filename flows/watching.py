"""What `shardwright serve` does once its server answers: deploy what is offered, and run what is asked for."""

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import DeploymentStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.runner import Runner
from prefect.settings import PREFECT_RUNNER_POLL_FREQUENCY

from flows.deployments import Offer, Watched, deploy
from flows.drill_requests import DrillRequest
from reports.errors import RequestError, ServerError
from reports.paths import real_path
from tasks.engine.formats.readers import check_folder
from tasks.restoring.trainer import refuse_unfound


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
        RequestError: an option that means nothing without --root, assets or a training step that are not there, or a path inside the run.
        FormatError: the root is not there.
    """
    if root is None:
        for option, value in (("--evaluations", evaluations), ("--assets", assets), ("--resume", resume)):
            if value:
                raise RequestError("needs --root", where=f"{option} {value}", remedy="Name the training run to look after.")
        return None
    DrillRequest(root=root, resume=resume)  # refuses what no drill would take
    if resume:
        refuse_unfound(resume)
    check_folder(root)
    if assets is not None and not assets.is_dir():
        raise RequestError("is no folder", where=f"--assets {assets}", remedy="Give the folder of config.json and tokenizer.")
    if evaluations is not None and real_path(evaluations).is_relative_to(real_path(root)):
        raise RequestError("lies inside the run", where=f"--evaluations {evaluations}", remedy="Choose a folder outside of --root.")
    return Watched(root.absolute(), evaluations.absolute() if evaluations else None, assets.absolute() if assets else None, resume)


def look_after(offers: Sequence[Offer], page: str) -> None:
    """Deploy, say what to open, and run until interrupted.

    Args:
        offers: what to deploy.
        page: the address of the server's page.

    Raises:
        RequestError: somebody else runs deployments of these names on the server.
        ServerError: the server is gone when it ends.
    """
    _refuse_served(offers, page)
    runner = Runner(name="shardwright", pause_on_shutdown=False)  # that would pause nothing if it ends before it has begun
    try:
        for offer in offers:
            runner.add_deployment(deploy(offer))
        print(f"open     {page}")
        for offer in offers:
            print(f"offers   {offer.flow.name}/{offer.name}{f', scheduled {offer.cron!r}' if offer.cron else ''}")
        print("stop     Ctrl-C", flush=True)
        asyncio.run(runner.start())  # ends by itself after a SIGTERM
    except (KeyboardInterrupt, TerminationSignal):
        print("stopping", flush=True)
    finally:
        _pause(offers, page)
    print("stopped  schedules are paused until the next serve")


def _pause(offers: Sequence[Offer], page: str) -> None:
    APILogHandler().flush()  # while the server is still there
    try:
        with get_client(sync_client=True) as client:
            for deployed in _read_deployed(client, offers).values():
                client.pause_deployment(deployed.id)
    except httpx.HTTPError as error:
        remedy = "Its deployments go on being scheduled and nobody runs them: pause them there, or serve again."
        raise ServerError(f"does not answer ({type(error).__name__})", where=page, remedy=remedy) from error


def _refuse_served(offers: Sequence[Offer], page: str) -> None:
    # A deployment belongs to whoever deployed it last, and whoever ends first pauses it: the other would go on without its schedules.
    polled = _last_polled(offers)
    if not polled:
        return
    print("waits    for a sign of whoever ran these deployments a moment ago", flush=True)
    time.sleep(2 * PREFECT_RUNNER_POLL_FREQUENCY.value())  # one that is alive asks in that time; one that was killed does not
    for name, moment in _last_polled(offers).items():
        if polled.get(name, moment) != moment:
            remedy = "Stop that one, or give this one a --name of its own."
            raise RequestError(f"{name} is run by another serve or worker", where=page, remedy=remedy)


def _last_polled(offers: Sequence[Offer]) -> dict[str, datetime]:
    # By name, of those that are not paused and were asked for work in the last minute.
    with get_client(sync_client=True) as client:
        found = _read_deployed(client, offers)
    ready = {name: one for name, one in found.items() if one.status == DeploymentStatus.READY and not one.paused}
    return {name: one.last_polled for name, one in ready.items() if one.last_polled is not None}


def _read_deployed(client: SyncPrefectClient, offers: Sequence[Offer]) -> dict[str, DeploymentResponse]:
    # By name, of those that somebody has deployed.
    wanted = [f"{offer.flow.name}/{offer.name}" for offer in offers]
    any_of = DeploymentFilter(name=DeploymentFilterName(any_=[offer.name for offer in offers]))
    flows = {flow.id: flow.name for flow in client.read_flows(deployment_filter=any_of)}
    found = {f"{flows[one.flow_id]}/{one.name}": one for one in client.read_deployments(deployment_filter=any_of)}
    return {name: found[name] for name in wanted if name in found}
