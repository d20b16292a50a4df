"""The export plan: frozen data that says what will be written, from what. Outside the engine it is read as JSON.

JSON, schema "shardwright.plan/1":

    {"schema", "source": {"format", "root", "step", "digest", "weights"}, "family", "naming", "dims": {…},
     "files": [{"name", "header_nbytes", "nbytes", "header_sha256": "" | of a header that is no safetensors', "tensors": [
        {"name", "shape", "dtype",                          the target; dtype is the safetensors code written
         "inputs": [{"name", "offset", "shape", "dtype", "full_shape"}],   the box of each source tensor that is consumed
         "op": {"name": "same" | "rope_to_halves" | "rope_to_pairs" | "transpose", …},  after leading dims of length 1 are dropped
         "encoding": "copy" | "cast" | a quantized one, such as "int8",
         "part": null | {"weight", "suffix", "shape", "dtype"},   which part of which quantized weight this is
         "span": [start, stop]}]}],                         bytes in the file, header included
     "aliases": [{"name", "of", "because"}],                source tensors left out because they must equal another source tensor
     "dropped": [{"name", "because", "asked_by", "targets"}],        a source tensor, or "<name> rows a-b" of one
     "kept_dtype": [names a cast left alone],
     "quantized": null | {"groups": [{"encoding", "targets"}], "ignore", "whole": [{"name", "because"}]},
     "digest"}

A target is `op(concatenation of its inputs' boxes)` cast to `dtype`; a part is made of its weight, which is that, cast to the part's
`dtype` and quantized. Every element of every source tensor is in exactly one box (the parts of a weight have the same ones), or its tensor
is dropped or an alias.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from pydantic import TypeAdapter

from tasks.engine.tensors.catalog import STORED, Weights
from tasks.engine.tensors.ops import OpCall
from tasks.engine.tensors.region import Region
from validators.expectation import TensorSpec

PLAN_SCHEMA = "shardwright.plan/1"


@dataclass(frozen=True, slots=True)
class Input:
    """The box of one source tensor that a target consumes. `full_shape` is the source tensor's shape."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    full_shape: tuple[int, ...]

    @property
    def region(self) -> Region:
        """The box."""
        return Region(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of which quantized weight a target is. `shape` is the weight's, `dtype` what it is cast to before it is quantized."""

    weight: str
    suffix: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One released tensor. `encoding` is "copy", "cast" or a key of ENCODINGS; `span` is its bytes in the output file, header included."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[Input, ...]
    op: OpCall
    encoding: str
    span: tuple[int, int] = (0, 0)
    part: Part | None = None

    @property
    def spec(self) -> TensorSpec:
        """The target without its values."""
        return TensorSpec(self.name, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file: header, then its tensors in this order, back to back, or on the alignment where a format wants it (GGUF).

    `header_sha256` is of a header that was made beforehand; "" where it follows from the tensors, as that of safetensors does.
    """

    name: str
    header_nbytes: int
    nbytes: int
    tensors: tuple[TensorPlan, ...]
    header_sha256: str = ""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The checkpoint the plan was made for."""

    format: str
    root: str
    step: int | None
    digest: str
    weights: Weights = STORED


@dataclass(frozen=True, slots=True)
class Alias:
    """A source tensor left out because it must equal another one: the second copy of a tied pair."""

    name: str
    of: str
    because: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source tensor left out on purpose, and the released names that are missing for it."""

    name: str
    because: str
    asked_by: Literal["rule", "request"]
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuantizedGroup:
    """Modules of one encoding: `targets` are names, `re:` patterns and classes, as quantization_config has them."""

    encoding: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix that stays unquantized though it was asked for, or is stored in a finer type."""

    name: str
    because: str


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a release says of its quantization, and the matrices that stay whole. No group where nothing could be quantized."""

    groups: tuple[QuantizedGroup, ...]
    ignore: tuple[str, ...]
    whole: tuple[Whole, ...]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What one export will write. `digest` covers everything but `source.root` and itself."""

    source: PlanSource
    family: str
    naming: str
    dims: Mapping[str, int | bool | str]
    files: tuple[FilePlan, ...]
    aliases: tuple[Alias, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    kept_dtype: tuple[str, ...] = ()
    quantized: Quantized | None = None
    digest: str = ""
    schema: str = field(default=PLAN_SCHEMA)

    def tensors(self) -> Iterator[tuple[FilePlan, TensorPlan]]:
        """Yield every target, in file order.

        Yields:
            Its file and the target.
        """
        for file in self.files:
            for tensor in file.tensors:
                yield file, tensor

    @property
    def num_parameters(self) -> int:
        """Values of all weights; scales and the like do not count."""
        weights = {t.part.weight: prod(t.part.shape) for _, t in self.tensors() if t.part is not None}
        return sum(weights.values()) + sum(t.spec.numel for _, t in self.tensors() if t.part is None)

    @property
    def is_gguf(self) -> bool:
        """Whether it is of a GGUF file."""
        return any(file.header_sha256 for file in self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all output files."""
        return sum(file.nbytes for file in self.files)


_ADAPTER = TypeAdapter(ExportPlan)


def plan_to_json(plan: ExportPlan) -> str:
    """Return the plan's stored form.

    Args:
        plan: any plan.

    Returns:
        JSON text, keys in the order of the schema.
    """
    return _ADAPTER.dump_json(plan).decode()


def plan_from_json(text: str) -> ExportPlan:
    """Return the plan stored as `text`.

    Args:
        text: what `plan_to_json` wrote.

    Returns:
        The plan.

    Raises:
        ValueError: not a plan of this schema, or its digest does not fit.
    """
    plan = _ADAPTER.validate_json(text)
    if plan.schema != PLAN_SCHEMA:
        raise ValueError(f"plan schema {plan.schema!r}, this version reads {PLAN_SCHEMA!r}")
    if plan.digest != digest_plan(plan):
        raise ValueError("plan was edited: its digest does not fit")
    return plan


def digest_plan(plan: ExportPlan) -> str:
    """Return the sha256 of a plan, apart from where its source lies.

    Args:
        plan: any plan.

    Returns:
        64 hex digits.
    """
    content = _ADAPTER.dump_python(plan, mode="json")
    content.pop("digest")
    content["source"].pop("root")
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
