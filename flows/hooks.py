"""What Prefect calls when an export was cancelled or its process died. Runs in the worker, after the flow's own process has ended.

Source: prefect 3.9. The parameters must have these names, or cancellation and crash hooks fail in the worker's log only.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.logging.loggers import flow_run_logger

from reports.errors import CommitError
from tasks.engine.writing.stage import lock_of, staged_destinations, stale_stages

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State
    from prefect.flows import Flow


def remove_what_is_staged(flow: "Flow[Any, Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """Remove the staging folders of a cancelled export; those of another export that is running stay.

    Args:
        flow: the flow.
        flow_run: the run that was cancelled.
        state: its last state.
    """
    log = flow_run_logger(flow_run, flow)
    for destination in _destinations(flow_run):
        try:
            with lock_of(destination):
                for stage in stale_stages(destination):
                    shutil.rmtree(stage)
                    log.info("%s: removed %s; nothing was published.", state.name, stage)
        except CommitError:
            log.info("Another export to %s is running: its stage stays.", destination)


def say_how_to_go_on(flow: "Flow[Any, Any]", flow_run: "FlowRun", state: "State[Any]") -> None:
    """Say in the run's log what a killed export left, and what to do with it.

    Args:
        flow: the flow.
        flow_run: the run whose process died.
        state: its last state.
    """
    log = flow_run_logger(flow_run, flow)
    for destination in _destinations(flow_run):
        for stage in stale_stages(destination):
            log.warning("%s: nothing was published. Run it again with the same fields: it goes on from %s.", state.name, stage)


def _destinations(flow_run: "FlowRun") -> list[Path]:
    request = flow_run.parameters.get("request", {})
    asked = request if isinstance(request, dict) else request.model_dump()
    return [Path(asked["to"]).absolute()] if "to" in asked else staged_destinations(Path(asked["into"]).absolute())
