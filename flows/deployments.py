"""What a lasting Prefect server offers: every flow on demand, and those of one training run on a schedule.

The same names stand in prefect.yaml, for who runs work pools; a test holds the two together.
"""

import re
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.export import export
from flows.export_newest import export_newest
from flows.gate import release_gate
from flows.restore_drill import restore_drill
from flows.retention_plan import retention_plan
from reports.errors import RequestError

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment
    from prefect.flows import Flow

TAG = "shardwright"
NIGHTLY, WEEKLY, HOURLY = "0 3 * * *", "0 5 * * 0", "7 * * * *"


@dataclass(frozen=True, slots=True)
class Offer:
    """One deployment: a flow under a name, with what its form is filled with, and when it runs by itself."""

    name: str
    flow: "Flow[Any, Any]"
    description: str
    request: Mapping[str, object] = field(default_factory=dict)
    cron: str | None = None
    at_once: int | None = None  # how many runs at a time; another waits


@dataclass(frozen=True, slots=True)
class Watched:
    """A training run that schedules look after: its root, where evaluation exports go (None for none), its assets, and the training step
    that drills continue with, as `module:function` ("" for none)."""

    root: Path
    evaluations: Path | None = None
    assets: Path | None = None
    resume: str = ""


def list_offers(runs: Path, watched: Watched | None, suffix: str = "") -> tuple[Offer, ...]:
    """Return what to deploy.

    Args:
        runs: where run folders go.
        watched: a training run to look after, or None.
        suffix: ends every name, so that two may be deployed to one server; "" for none.

    Returns:
        The offers on demand, then the scheduled ones.

    Raises:
        RequestError: the suffix holds what no name may.
    """
    if suffix and not re.fullmatch(r"[\w.-]+", suffix):
        raise RequestError("is no name", where=f"--name {suffix}", remedy="Use letters, digits, dot, dash and underscore.")
    offers = (*_on_demand(runs), *(_scheduled(runs, watched) if watched else ()))
    return tuple(replace(offer, name=f"{offer.name}-{suffix}") for offer in offers) if suffix else offers


def _on_demand(runs: Path) -> list[Offer]:
    common = {"runs": str(runs)}
    return [
        Offer("on-demand", export, "Export a checkpoint into verified, published release weights.", common),
        Offer("on-demand", release_gate, "Give one verdict on a finished folder of weights.", common),
        Offer("on-demand", restore_drill, "Prove that training can come back from a run's checkpoints.", common, at_once=1),
        Offer("on-demand", retention_plan, "Say which saves of a training run may go, and why. Deletes nothing.", common),
    ]


def _scheduled(runs: Path, watched: Watched) -> list[Offer]:
    run, d3 = {"runs": str(runs), "root": str(watched.root)}, {"level": "D3", "resume": watched.resume}
    offers = [
        Offer("nightly", restore_drill, f"Every night: the newest and an older save of {watched.root} are read whole.", run, NIGHTLY, 1),
        Offer("weekly-plan", retention_plan, f"Every week: which saves of {watched.root} may go. Deletes nothing.", run, WEEKLY, 1),
        Offer("weekly", restore_drill, f"Every week: real processes restore {watched.root}.", run | d3, WEEKLY, 1),
    ]
    if watched.evaluations is not None:
        exports = run | {"into": str(watched.evaluations)} | ({"assets": str(watched.assets)} if watched.assets else {})
        offers.append(Offer("evaluation", export_newest, f"The newest complete checkpoint of {watched.root}, once.", exports, HOURLY, 1))
    return offers


def deploy(offer: Offer) -> "RunnerDeployment":
    """Return an offer as Prefect takes it.

    Args:
        offer: what to deploy.

    Returns:
        A deployment that `prefect.serve` runs in processes of this machine.
    """
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.types.entrypoint import EntrypointType

    made = offer.flow.to_deployment(
        offer.name,
        description=offer.description,
        parameters={"request": dict(offer.request)},
        cron=offer.cron,
        tags=[TAG],
        concurrency_limit=ConcurrencyLimitConfig(limit=offer.at_once) if offer.at_once else None,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert not isinstance(made, Coroutine)  # only inside an event loop
    return made
