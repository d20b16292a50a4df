"""The newest complete checkpoint of a run, exported once: for a schedule that feeds evaluation.

Each step gets a folder of its own; one that is there already is left alone, so that a schedule may ask as often as it likes.
"""

from pathlib import Path
from typing import Literal

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict, Field, field_validator

from flows.export import check_request, run_export
from flows.hooks import remove_what_is_staged, say_how_to_go_on
from flows.requests import ExportRequest, Size, default_runs, refuse_unfit
from flows.run import PrefectRunner, show_ended
from reports.errors import FormatError
from tasks.artifacts import ProgressArtifact
from tasks.engine.formats.readers import check_folder, open_checkpoint
from validators.release import MARKER_NAME


class NewestRequest(BaseModel):
    """The newest complete checkpoint of a run, exported if it has not been yet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path = Field(description="The training run's root, with a folder per step.")
    into: Path = Field(description="Where releases go, each in a folder step-N.")
    assets: Path | None = Field(None, description="Folder of config.json and tokenizer. Default: the checkpoint itself, if it holds them.")
    dtype: Literal["source", "fp32", "bf16", "fp16"] = Field("bf16", description="Dtype of the released floats; source: the checkpoint's.")
    family: str = Field("auto", description="auto, none, or a model family's name.")
    workers: int = Field(2, ge=1, le=64, description="Output files written at a time.")
    witness_memory: Size = Field(8_000_000_000, description="Memory the logits comparison and the framework witness may use.")
    runs: Path = Field(default_factory=default_runs, description="Where run folders go. Default: $SHARDWRIGHT_RUNS, else runs.")

    _paths = field_validator("root", "into", "assets", "runs", mode="before")(refuse_unfit)


@flow(
    name="export newest",
    flow_run_name="newest of {request.root.name}",
    validate_parameters=True,
    on_cancellation=[remove_what_is_staged],
    on_crashed=[say_how_to_go_on],
)
def export_newest(request: NewestRequest) -> str:
    """Export the newest complete checkpoint of a run, once.

    Args:
        request: of which run, and where to.

    Returns:
        Path of the HTML report, or a sentence that says that the step is there already.

    Raises:
        FormatError: no step is complete, or the newest checkpoint has no number.
        RedVerdictError: a check failed, nothing was published.
    """
    check_folder(request.root)
    step = open_checkpoint(request.root).catalog().step
    if step is None:
        raise FormatError("is no numbered step", where=str(request.root), remedy="Give the run's root, with a folder per step.")
    to = request.into / f"step-{step}"
    if (to / MARKER_NAME).is_file():
        told = f"step {step} is exported already: {to}"
        get_run_logger().info(told)
        return told
    request.into.mkdir(parents=True, exist_ok=True)
    wanted = request.model_dump(exclude={"root", "into"}) | {"source": request.root, "to": to, "step": step}
    asked = ExportRequest.model_validate(wanted)
    check_request(asked)
    return show_ended(lambda: run_export(asked, PrefectRunner(), ProgressArtifact()))
