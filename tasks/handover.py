"""What the tasks hand to each other: paths, digests, names and results. Never tensors, never plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reports.model import Change, CheckResult, LogitsComparison, Omission, Witness
from reports.moment import Moment


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A checkpoint as it was when the run began: its digest says whether it still is. `weights` are the model's or the optimizer's."""

    path: Path
    also: tuple[Path, ...]
    step: int | None
    digest: str = ""
    tag: str = ""
    weights: Literal["stored", "master"] = "stored"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was opened. `table` is a SourceTable; `roots` its folders, the step resolved."""

    ref: SourceRef
    format: str
    moment: Moment
    roots: tuple[Path, ...]
    table: Path
    num_tensors: int
    num_state: int
    nbytes: int
    notes: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its folder, format, step and tokens, as reports name it."""
        return f"{self.roots[0]} ({', '.join(filter(None, (self.format, self.moment.spell())))})"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """How a checkpoint should be released. `dtype` is a safetensors code or "" for the source's; `assets` the config's folder; `keep` are
    released names that a cast leaves alone, beside the family's; `quantize` are (pattern of released names, encoding, why it stays whole);
    `gguf` is how matrices are stored in a GGUF file, "" where none is asked for, and `title` the model's name in it; `like` are the names
    of a release that says whether prediction layers are wanted, None to take what the source has.
    """

    assets: Path | None
    family: str
    dtype: str
    drops: tuple[tuple[str, str], ...]
    keep_tied_head: bool
    max_file_bytes: int
    keep: tuple[str, ...] = ()
    quantize: tuple[tuple[str, str, str], ...] = ()
    gguf: str = ""
    title: str = ""
    like: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan in the run folder, with what later steps need to know of it.

    `whole` is the same plan with every weight in one piece, which is what the source is compared with: `path` itself where nothing is
    quantized; `table` is a PlanTable of it. `uncast` is the plan without casts as well, None where there is nothing to leave out;
    `expected` a stored Expectation, None for `--family none`; `config` the config the release gets, None without; `notes` are for the
    reader of plan and report; `unloadable` says why transformers will not load the release, "" where nothing is known against it.
    `header` holds the first bytes of a GGUF file, None where safetensors are written.
    """

    path: Path
    whole: Path
    digest: str
    table: Path
    expected: Path | None
    config: Path | None
    files: tuple[tuple[str, int], ...]
    nbytes: int
    uncast: Path | None
    source_dtype: str
    release_dtype: str
    changes: tuple[Change, ...]
    omissions: tuple[Omission, ...]
    notes: tuple[str, ...] = ()
    unloadable: str = ""
    header: Path | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are stored in parts, as compressed-tensors does."""
        return self.whole != self.path and self.header is None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file that is written."""
        return self.header is not None


@dataclass(frozen=True, slots=True)
class Described:
    """A finished folder of weights, before a tensor byte is read.

    `expected` is a stored Expectation, None where `reason` says why there is none. `dtype` is the safetensors code of most of its values,
    "" where nothing is stored; `holds_head` whether the head is stored; `has_config` whether a forward could be tried; `kept` are the
    tensors left in fp32 that may be; `names` are all that is stored.
    """

    folder: Path
    expected: Path | None
    reason: str
    dtype: str
    holds_head: bool
    has_config: bool
    nbytes: int
    kept: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A release re-read from disk: paths of a TensorTable, a ValueTable and a PartTable, and the witnesses that were heard or not.

    `witness` is the second path; `more` are those that some formats have beside it. `gguf` is a GgufTable, None where no GGUF file was
    held against the source.
    """

    tensors: Path
    values: Path
    parts: Path
    witness: Witness
    more: tuple[Witness, ...] = ()
    gguf: Path | None = None

    @property
    def witnesses(self) -> tuple[Witness, ...]:
        """All of them."""
        return (self.witness, *self.more)


@dataclass(frozen=True, slots=True)
class Compared:
    """What the logits showed: comparisons, witnesses heard or not, why there is nothing to compare, and a ValueTable of the live model."""

    comparisons: tuple[LogitsComparison, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    reason: str = ""
    values: Path | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What an earlier run measured, as far as it still holds: its tables, and the weight files whose bytes are the same."""

    tensors: Path
    values: Path
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class Referred:
    """A reference: its folder, what its config's class takes absent fields for, and a TensorTable where it is an earlier release."""

    folder: Path
    defaults: Mapping[str, object]
    tensors: Path | None = None


@dataclass(frozen=True, slots=True)
class ReleaseFacts:
    """All that is known of a finished release: what its checks judge, and what planted faults start from.

    `planned` says how its source would be exported to it, None without a source; `measured` is None as long as no tensor was read;
    `digests` are sha256 by weight file; `referred` is a reference beside the source, None without one.
    """

    described: Described
    planned: Planned | None = None
    measured: Measured | None = None
    compared: Compared = field(default_factory=Compared)
    digests: Mapping[str, str] = field(default_factory=dict)
    referred: Referred | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """What the checks said."""

    results: tuple[CheckResult, ...]

    def failed(self) -> Sequence[CheckResult]:
        """Return what stands against publishing.

        Returns:
            The results that are failed or errored.
        """
        return [result for result in self.results if result.status in ("failed", "errored")]
