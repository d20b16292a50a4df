"""What a drill may be asked: one flat frozen model for command line, YAML and Prefect's form."""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flows.requests import Size, default_runs, refuse_unfit

_TRAINER = r"[\w.]+:\w+"


class DrillRequest(BaseModel):
    """One restore drill of a training run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path = Field(description="The training run's root, with a folder per save; or one save.")
    also: list[Path] = Field(default_factory=list, description="More roots of the same saves, for node-local disks.")
    level: Literal["D1", "D2", "D3"] | None = Field(
        None, description="D1 commit, D2 state, D3 resume; each includes those before. Default: D2, with --resume D3."
    )
    resume: str = Field(
        "", json_schema_extra={"pattern": rf"^$|^{_TRAINER}$"}, description="module:function of the training step to continue with."
    )
    steps: int = Field(20, ge=3, description="Steps to continue for, at most as many as are logged after the save.")
    world: int = Field(0, ge=0, description="Ranks to resume with. 0: as many as had saved, as the log or the save's files tell.")
    max_ranks: int = Field(8, ge=1, description="Processes that this machine may run at a time.")
    timeout: float = Field(1800, gt=0, description="Seconds that a restore or a resume may take.")
    memory: Size = Field(8_000_000_000, description="Bytes that a restore may hold at a time.")
    goals: Path | None = Field(None, description="YAML of targets: rto_seconds, rpo_steps, mtbf_seconds, save_seconds …")
    log: Path | None = Field(None, description="The trainer's log, as JSON lines: step, rank, loss, lr, batch, time.")
    workers: int = Field(2, ge=1, le=64, description="Tensors read at a time.")
    junit: Path | None = Field(None, description="Write the results there as well, as JUnit XML.")
    runs: Path = Field(
        default_factory=default_runs,
        description="Where run folders, history and records go. Default: $SHARDWRIGHT_RUNS, else runs.",
    )

    _paths = field_validator("root", "also", "goals", "log", "junit", "runs", mode="before")(refuse_unfit)

    @field_validator("resume")
    @classmethod
    def _resume_names_a_function(cls, resume: str) -> str:
        if resume and not re.fullmatch(_TRAINER, resume):
            raise ValueError(f"{resume!r}: write module:function, such as my_trainer:build")
        return resume

    @model_validator(mode="after")
    def _resume_is_d3(self) -> "DrillRequest":
        if self.resume and self.level not in (None, "D3"):
            raise ValueError(f"--resume continues training, which is level D3, not {self.level}")
        return self

    @model_validator(mode="after")
    def _world_can_run(self) -> "DrillRequest":
        if self.world > self.max_ranks:
            raise ValueError(f"--world {self.world} is more than --max-ranks {self.max_ranks}; raise that if this machine can run so many")
        if self.world and not self.resume:
            raise ValueError("--world is how many ranks --resume continues with, which was not given")
        return self

    @property
    def reach(self) -> str:
        """The level to drill at."""
        return self.level or ("D3" if self.resume else "D2")
