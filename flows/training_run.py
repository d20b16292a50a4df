"""A training run as requests name it: its saves, its log, its evaluations, the policy of its owner."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flows.requests import default_runs, refuse_unfit
from validators.retention.policy import RetentionPolicy, read_retention_policy
from validators.retention.training_log import LogLine, read_training_log


class TrainingRunRequest(BaseModel):
    """Which training run, and what lies beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path = Field(description="The training run's root, with a folder per save.")
    policy: Path | None = Field(None, description="YAML of what to keep. Default: the last three saves.")
    log: Path | None = Field(None, description="The trainer's log: JSON lines, trainer_state.json or CSV.")
    evals: list[Path] = Field(default_factory=list, description="Evaluation results: files, or folders of them; their saves stay.")
    runs: Path = Field(
        default_factory=default_runs, description="Where run folders and history are. Default: $SHARDWRIGHT_RUNS, else runs."
    )

    _paths = field_validator("root", "policy", "log", "evals", "runs", mode="before")(refuse_unfit)

    def read_policy(self) -> RetentionPolicy:
        """Return the owner's policy.

        Returns:
            What the file says; the defaults without one.

        Raises:
            RequestError: the file is malformed.
        """
        return read_retention_policy(self.policy) if self.policy is not None else RetentionPolicy()

    def read_log(self, policy: RetentionPolicy) -> tuple[LogLine, ...]:
        """Return what the trainer logged.

        Args:
            policy: the run's, for the tokens of a step.

        Returns:
            By step; empty without a log.

        Raises:
            RequestError: the file is malformed.
        """
        return read_training_log(self.log, policy.tokens_per_step) if self.log is not None else ()
