"""What a release should hold, and what is known of it: the values every check works on. No torch here.

Dtypes are safetensors codes ("F32", "BF16"); shapes are tuples of element counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType

import pandas as pd
from pydantic import TypeAdapter

from reports.model import LogitsComparison, Witness
from validators.release import Release

# Bytes of one element, by safetensors dtype code. Source: safetensors 0.8 README, format section.
ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E8M0": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "I64": 8,
        "U64": 8,
        "F64": 8,
    }
)
FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes the values take."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """One MoE layer: its router weight, and per global expert id the names of that expert's tensors, in one order for all."""

    layer: int
    router: str
    experts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the config implies: every published tensor with its shape, in the model's order.

    `shapes` says nothing of dtypes (those follow the request). `tied` lists (kept, alias) name pairs that are one tensor when
    `is_tied`. `embedding` names the token embedding, (vocab, hidden); `head` the output projection. `keep_fp32` are the names whose
    dtype a cast leaves alone, `may_keep_fp32` those that a release may hold in fp32 whatever it was cast to. `quantized` are the shapes
    of weights that are stored in parts, by the weight's own name; `shapes` has the parts, and the other fields name the part with the
    values.
    """

    family: str
    shapes: Mapping[str, tuple[int, ...]]
    is_tied: bool
    tied: tuple[tuple[str, str], ...] = ()
    experts: tuple[ExpertGroup, ...] = ()
    embedding: str = ""
    head: str = ""
    keep_fp32: frozenset[str] = frozenset()
    may_keep_fp32: frozenset[str] = frozenset()
    quantized: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a release is held against besides values: `config`, `generation_config` and tokenizer of `folder`.

    `defaults` are what the config's class takes absent fields for; empty where the class is not known. `tensors` is a TensorTable of
    an earlier release, whose weights are others; None where none was measured.
    """

    folder: Path
    config: Mapping[str, object] = field(default_factory=dict)
    generation_config: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    tensors: pd.DataFrame | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a release when the checks run. What was not gathered is None or empty, and the checks that need it are skipped.

    `plan` is a PlanTable, `tensors` a TensorTable, `values` a ValueTable, `parts` a PartTable, `gguf` a GgufTable where a source was
    heard (validators.tables). `dtype` is the release dtype code asked for, "" for the source's own. `reasons` says, per need, why it is
    absent ("no config.json in --assets"). `digests` are sha256 hex digests of weight files as re-read, by file name. `in_stage` says that
    the release is complete but not committed yet. `suite` is the JSON text of the policy's statistics suite, "" for the one that is
    shipped. `reference` is what config, tokenizer and statistics are held against.
    """

    release: Release
    expected: Expectation | None = None
    plan: pd.DataFrame | None = None
    tensors: pd.DataFrame | None = None
    values: pd.DataFrame | None = None
    parts: pd.DataFrame | None = None
    witnesses: tuple[Witness, ...] = ()
    logits: tuple[LogitsComparison, ...] = ()
    dtype: str = ""
    suite: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    in_stage: bool = False
    reference: Reference | None = None
    gguf: pd.DataFrame | None = None


_STORED = TypeAdapter(Expectation)


def expectation_to_json(expected: Expectation) -> str:
    """Return an expectation's stored form.

    Args:
        expected: any expectation.

    Returns:
        JSON text.
    """
    return _STORED.dump_json(expected).decode()


def expectation_from_json(text: str) -> Expectation:
    """Return the expectation stored as `text`.

    Args:
        text: what `expectation_to_json` wrote.

    Returns:
        The expectation; names keep their order.
    """
    return _STORED.validate_json(text)
