"""The plan of what is kept, as a Prefect flow for forms and schedules. It never deletes: that is asked for at a command line."""

from prefect import flow

from flows.retention import PlanRequest, RetainRequest, retain
from flows.run import Outcome, show_ended
from tasks.artifacts import show_fates


@flow(name="retention plan", flow_run_name="plan of {request.root.name}", validate_parameters=True)
def retention_plan(request: PlanRequest) -> str:
    """Say which saves of a training run may go, and why. Deletes nothing.

    Args:
        request: of which run, by which policy.

    Returns:
        Path of the HTML report.
    """
    return show_ended(lambda: _plan(request))


def _plan(request: PlanRequest) -> Outcome:
    retained = retain(RetainRequest(**request.model_dump()))
    show_fates(retained.report)
    return Outcome(retained.report, retained.paths, retained.report.verdict())
