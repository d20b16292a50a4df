"""What a drill may be asked: one flat frozen model for command line, YAML and Prefect's form."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flows.requests import refuse_unprintable


class DrillRequest(BaseModel):
    """One restore drill of a training run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path = Field(description="The training run's root, with a folder per save; or one save.")
    also: list[Path] = Field(default_factory=list, description="More roots of the same saves, for node-local disks.")
    level: Literal["D1", "D2"] = Field("D2", description="D1 commit, D2 state; each includes those before.")
    goals: Path | None = Field(None, description="YAML of targets: rto_seconds, rpo_steps, mtbf_seconds, save_seconds …")
    log: Path | None = Field(None, description="The trainer's log, as JSON lines: step, rank, loss, lr, batch, time.")
    workers: int = Field(2, ge=1, le=64, description="Tensors read at a time.")
    junit: Path | None = Field(None, description="Write the results there as well, as JUnit XML.")
    runs: Path = Field(Path("runs"), description="Where run folders with reports, the history and the records go.")

    _paths = field_validator("root", "also", "goals", "log", "junit", "runs")(refuse_unprintable)
