"""What each flow may be asked: flat frozen models that the command line, a YAML file and the Prefect form share.

Flat, because Prefect's form loses the fields of nested unions. Its API checks the JSON schema only, so a flow validates again.
"""

import os
import re
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

RUNS_VARIABLE = "SHARDWRIGHT_RUNS"
DTYPES = {"source": "", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str | int) -> int:
    """Return a size in bytes.

    Args:
        text: `5GB`, `512MiB`, `1000`; a bare number counts bytes, K M G T are powers of 1000, Ki Mi Gi Ti of 1024.

    Returns:
        Bytes.

    Raises:
        ValueError: not a size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 5GB, 512MiB or a number of bytes")
    base = 1024 if match[3] else 1000
    return int(Fraction(match[1]) * base ** _POWERS[match[2].upper()])


def _split_reason(text: str) -> tuple[str, str]:
    what, sign, reason = text.partition("=")
    if not (what.strip() and sign and reason.strip()):
        raise ValueError(f"{text!r}: write NAME=REASON; the reason goes into plan, report and manifest")
    return what.strip(), reason.strip()


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


def default_runs() -> Path:
    """Return where run folders go when nobody says.

    Returns:
        `$SHARDWRIGHT_RUNS`, else ./runs.
    """
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def split_reasons(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """Return what is left out on purpose, and why.

    Args:
        texts: `WHAT=REASON` each.

    Returns:
        (what, reason) pairs.

    Raises:
        ValueError: one without a reason.
    """
    return tuple(_split_reason(text) for text in texts)


def refuse_unfit(value: object) -> object:
    """Return paths as they were given, if they name something and a report can show them.

    Args:
        value: a path, a list of them, or what the field's type refuses.

    Returns:
        The same.

    Raises:
        ValueError: an empty text, which would be the working directory; a control character, or one outside every encoding.
    """
    for path in value if isinstance(value, list) else [value]:
        if isinstance(path, str) and not path.strip():
            raise ValueError("is empty; name a path, or leave it out where it may be")
        if isinstance(path, (str, Path)) and any(unicodedata.category(sign) in ("Cc", "Cs") for sign in str(path)):
            raise ValueError(f"{str(path)!r} holds what no report can show; rename it, or give a link to it")
    return value


def _in_lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _has_reason(values: list[str]) -> list[str]:
    for value in values:
        _split_reason(value)
    return values


class GateRequest(BaseModel):
    """One verdict on a finished folder of weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: Path = Field(description="The folder of release weights: any Hugging Face folder of safetensors.")
    against: Path | None = Field(
        None, description="The checkpoint it was made from: exact values and logits are compared. Or another release of the model."
    )
    weights: Literal["auto", "same", "retrained"] = Field(
        "auto",
        description="Whether the weights must be those of --against. auto: same, unless both manifests name a step and the steps differ.",
    )
    assets: Path | None = Field(
        None, description="Folder of the config and tokenizer it must have. Default: --against, if it holds a config."
    )
    step: int | None = Field(None, ge=0, description="Which step of --against, if that is a run's root.")
    tag: str = Field("", description="Which save of --against, if that holds several under tags (DeepSpeed).")
    golden: Path | None = Field(None, description="safetensors file of input_ids and logits recorded by the trainer.")
    family: str = Field("auto", description="auto, none, or a model family's name.")
    drop: list[str] = Field(default_factory=list, description="PATTERN=REASON: tensors of --against that the release lacks on purpose.")
    skip: list[str] = Field(default_factory=list, description="CHECK=REASON: checks to leave out on purpose.")
    policy: Path | None = Field(None, description="policy.yaml: required checks, limits, waivers, rules for the statistics.")
    prove: int = Field(0, ge=0, le=1000, description="Plant that many faults into the evidence, and see that the checks catch each.")
    stop_early: bool = Field(False, description="Read no tensor if files, config, tokenizer or names already show an error.")
    changed_since: Path | None = Field(
        None, description="report.json of an earlier gate: weight files with the same sha256 are not measured again."
    )
    workers: int = Field(2, ge=1, le=64, description="Tensors read at a time.")
    witness_memory: Size = Field(8_000_000_000, description="Memory the logits comparison and the framework witness may use.")
    report: Path | None = Field(None, description="Folder to copy the report's four files to.")
    junit: Path | None = Field(None, description="Write the results there as well, as JUnit XML.")
    runs: Path = Field(default_factory=default_runs, description="Where run folders go. Default: $SHARDWRIGHT_RUNS, else runs.")

    _paths = field_validator(
        *("release", "against", "assets", "golden", "policy", "changed_since", "report", "junit", "runs"), mode="before"
    )(refuse_unfit)
    _reasons = field_validator("drop", "skip")(_has_reason)

    @property
    def drops(self) -> tuple[tuple[str, str], ...]:
        """(pattern, reason) of source tensors to leave out."""
        return split_reasons(self.drop)

    @property
    def skips(self) -> dict[str, str]:
        """Check → reason of what not to check."""
        return dict(_split_reason(text) for text in self.skip)


class ExportRequest(BaseModel):
    """One export: a checkpoint in, a release out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path = Field(
        description="The checkpoint, by PyTorch DCP, torchtitan, accelerate, DeepSpeed, Megatron or Hugging Face; or a run's root."
    )
    to: Path = Field(description="Where the release will be. Must not exist.")
    assets: Path | None = Field(None, description="Folder of config.json and tokenizer. Default: the checkpoint itself, if it holds them.")
    golden: Path | None = Field(None, description="safetensors file of input_ids and logits recorded by the trainer.")
    dtype: Literal["source", "fp32", "bf16", "fp16"] = Field("source", description="Dtype of the released floats.")
    quantize: str = Field(
        "",
        description="Store linear layers quantized, as compressed-tensors does: fp8 (a scale per channel), fp8-block (per 128x128), int8"
        " (W8A16), int8-w8a8, int4 (groups of 128); or a YAML file of rules.",
    )
    gguf: Literal["", "f16", "bf16", "q8_0"] = Field(
        "", description="Write one GGUF file in the place of safetensors; how its matrices are stored."
    )
    weights: Literal["stored", "master"] = Field(
        "stored", description="stored: the model's own tensors. master: the optimizer's fp32 masters (DeepSpeed's are always)."
    )
    family: str = Field("auto", description="auto, none, or a model family's name.")
    step: int | None = Field(None, ge=0, description="Which step of a run's root; the newest complete one by default.")
    tag: str = Field("", description="Which save of a folder that holds several under tags (DeepSpeed); the latest by default.")
    also: list[Path] = Field(default_factory=list, description="More roots of the same save, for node-local disks.")
    drop: list[str] = Field(default_factory=list, description="PATTERN=REASON: source tensors to leave out on purpose.")
    skip: list[str] = Field(default_factory=list, description="CHECK=REASON: checks to leave out on purpose.")
    policy: Path | None = Field(None, description="policy.yaml: required checks, limits, waivers.")
    keep_tied_head: bool = Field(False, description="Write the head of a tied model as well.")
    max_file: Size = Field(5_000_000_000, description="Tensor bytes per output file: a number, 5000000000 for 5 GB.")
    workers: int = Field(2, ge=1, le=64, description="Output files written at a time.")
    witness_memory: Size = Field(8_000_000_000, description="Memory the logits comparison and the framework witness may use.")
    approve: bool = Field(False, description="Ask a person before publishing; silence rejects.")
    approve_within: int = Field(86_400, ge=1, description="Seconds to wait for that answer.")
    wait: bool = Field(False, description="Wait for another export to the same destination to end, instead of refusing.")
    keep_stage: bool = Field(False, description="Keep the staging folder when a check fails.")
    fsync: bool = Field(True, description="Wait until the disk has everything before publishing.")
    runs: Path = Field(default_factory=default_runs, description="Where run folders go. Default: $SHARDWRIGHT_RUNS, else runs.")

    _paths = field_validator("source", "to", "assets", "golden", "policy", "runs", "also", mode="before")(refuse_unfit)
    _reasons = field_validator("drop", "skip")(_has_reason)
    _spelled = field_validator("gguf", mode="before")(_in_lower_case)

    @model_validator(mode="after")
    def _says_once_how_values_are_stored(self) -> Self:
        options = {"dtype": self.dtype != "source", "quantize": bool(self.quantize), "keep_tied_head": self.keep_tied_head}
        others = [f"--{name.replace('_', '-')}" for name, is_given in options.items() if is_given]
        if self.gguf and others:
            raise ValueError(f"--gguf says how values are stored, and engines tie by the head's absence; leave out {', '.join(others)}")
        return self

    @property
    def dtype_code(self) -> str:
        """The safetensors code of the dtype asked for; "" for the source's."""
        return DTYPES[self.dtype]

    @property
    def drops(self) -> tuple[tuple[str, str], ...]:
        """(pattern, reason) of what to leave out."""
        return split_reasons(self.drop)

    @property
    def skips(self) -> dict[str, str]:
        """Check → reason of what not to check."""
        return dict(_split_reason(text) for text in self.skip)
