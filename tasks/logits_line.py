"""The logits comparisons of one export, put together: *mapping* against witnesses, *cast* against the merged values.

*Mapping*: the merged values, before any cast, against what a witness says: recorded logits at the limits of the coarsest of the source's
dtype and that of the recorded forward, the framework's live model and the native forward at those of fp32. A native forward that does not
give what the trainer recorded is not heard: it knows less of the run than the record does.

*Cast*: the release against the merged values, its mean KL held near what an honest cast by torch costs in this very run, or a
quantization by compressed-tensors. Where nothing is cast the release is the merged folder, and a second forward must give the same logits.

Every forward of ours runs in fp32: rounding is then the weights', not the forward's.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from reports.model import LogitsComparison, Witness
from tasks.batches import Batch
from tasks.compressed import scheme_bits, write_honest_quantization
from tasks.divergence import Divergence, diverge
from tasks.forward import Room, default_batches, first_diverging_layer, limits_of, nbytes_of, open_model, reachable_ids, why_not_runnable
from tasks.honest_cast import write_honest_cast
from tasks.honest_gguf import write_honest_gguf
from tasks.measure import DTYPES
from tasks.witnesses import framework, native_forward, native_shards, recorded
from tasks.witnesses.hearing import NotHeardError
from validators.policy import LIMITS, LOWER, TOP1_POSITIONS, UPPER, LimitsRow, cast_limits, limits_row, quantized_row
from validators.quantization import read_quantization
from validators.release import open_release

_NATIVE_NOISE = 2.0**-13  # of the largest logit: two ways to compute the same model in fp32 are nearer than this
_EPS = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7, "F64": 2.0**-52}  # spacing of the floats at one


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared.

    `merged` is the release before any cast, or `release` itself when nothing was cast. Dtypes are safetensors codes. `tokenizer` is a
    folder with a sound tokenizer, or None; `scratch` a folder that is made, filled and removed. `encodings` says how weights were
    quantized, by name; none for a release that another tool quantized, whose logits are not compared. `of_masters`: the optimizer's
    fp32 masters were exported, but the trainer ran with weights of its own precision. `gguf` is the type most of a GGUF file's bytes have.
    """

    release: Path
    merged: Path
    source_format: str
    source_roots: tuple[Path, ...]
    source_dtype: str
    release_dtype: str
    is_moe: bool
    golden: Path | None
    tokenizer: Path | None
    memory_limit: int
    scratch: Path
    encodings: Mapping[str, str] = field(default_factory=dict)
    of_masters: bool = False
    gguf: str = ""

    @property
    def mapping_dtype(self) -> str:
        """What the weights that the trainer ran with were rounded to, at the coarsest."""
        return "BF16" if self.of_masters else self.source_dtype

    @property
    def is_cast(self) -> bool:
        """Whether the release's values are a cast of the merged ones."""
        return self.release != self.merged

    @property
    def cast_row(self) -> LimitsRow:
        """The limits that its dtype, or its coarsest encoding, allows."""
        if self.gguf == "Q8_0":
            return quantized_row({("int", 8)}, is_moe=self.is_moe)
        if self.encodings:
            return quantized_row({scheme_bits(encoding) for encoding in self.encodings.values()}, is_moe=self.is_moe)
        return limits_row(self.gguf or self.release_dtype, self.source_dtype, "", is_moe=self.is_moe)

    def recorded_row(self, computed_in: str) -> LimitsRow:
        """Return the limits of the merged values against recorded logits; of a GGUF file without a source, those of its own type.

        Args:
            computed_in: dtype of the recorded forward.

        Returns:
            A key of LIMITS.
        """
        own = "" if self.is_cast else self.gguf
        return self.cast_row if own == "Q8_0" else limits_row(own, self.mapping_dtype, computed_in, is_moe=self.is_moe)

    @property
    def is_decoded(self) -> bool:
        """Whether transformers decodes the stored values before it runs them: then all of them must fit in memory."""
        return bool(self.encodings or self.gguf)

    @property
    def room(self) -> Room:
        """What each forward may use."""
        return Room(self.memory_limit, self.scratch / "offload")


@dataclass(frozen=True, slots=True)
class LogitsEvidence:
    """What was found. `values` is a ValueTable of live parameters, None when the framework was not heard; `reason` why nothing ran."""

    comparisons: tuple[LogitsComparison, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    values: pd.DataFrame | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Run:
    # What the merged model gave: logits by batch, in the order of the batches.
    batches: tuple[Batch, ...]
    logits: tuple[torch.Tensor, ...]
    reachable: int


def compare(subject: Subject) -> LogitsEvidence:
    """Run the release and hold its logits against what is known.

    Args:
        subject: what to compare.

    Returns:
        The comparisons, the witnesses heard or not, and the framework's comparison of parameters.

    Raises:
        FormatError: the golden file cannot be this model's.
        ForwardError: transformers does not load the release or the merged folder.
    """
    if subject.scratch.exists():
        shutil.rmtree(subject.scratch)  # left behind by a run that was killed
    subject.scratch.mkdir(parents=True)
    try:
        return _compare(subject)
    finally:
        shutil.rmtree(subject.scratch)


def _compare(subject: Subject) -> LogitsEvidence:
    reason = why_not_runnable(subject.release) or (_why_too_large(subject) if subject.is_decoded else why_not_comparable(subject.release))
    if reason:
        own = (native_forward.NAME,) if subject.source_format in native_shards.FORMATS else ()
        silent = tuple(Witness(name, False, ("mapping",), reason) for name in ("recorded", framework.NAME, *own))
        return LogitsEvidence(witnesses=silent, reason=reason)
    golden = read_golden(subject.golden, subject.release, subject.tokenizer) if subject.golden else None
    live, values, said = _hear_framework(subject)
    batches = default_batches(subject.release, tokenizer_folder=subject.tokenizer)
    if golden is not None:
        batches = (*batches, Batch("recorded", golden.input_ids))
    run = _Run(batches, _run(subject.merged, batches, subject), reachable_ids(subject.release, subject.tokenizer))
    comparisons = []
    if golden is not None:
        comparisons.append(_compare_recorded(subject, golden, run))
    if live is not None:
        comparisons.append(_compare_framework(subject, live, run))
    native = _hear_native(subject, golden, run)
    comparisons += native.comparisons
    comparisons.append(_compare_cast(subject, run) if subject.is_cast else _repeat(subject, run))
    heard = Witness("recorded", golden is not None, ("mapping",), _describe(golden))
    return LogitsEvidence(tuple(comparisons), (heard, said, *native.witnesses), values)


def why_not_comparable(folder: Path) -> str:
    """Say why no logits of a release are compared, from its config alone.

    A quantized model runs in its engine's kernels; transformers would have to dequantize it, and no limits are known for that.

    Args:
        folder: the release.

    Returns:
        The reason; empty when nothing speaks against it.
    """
    method = read_quantization(open_release(folder)).method
    return f"quantized ({method}): logits are the serving engine's to compare" if method else ""


def _why_too_large(subject: Subject) -> str:
    # A quantized model is unpacked in memory at its first forward, a GGUF file while it is loaded; neither can run from disk.
    needed = nbytes_of(subject.merged, torch.float32)
    return (
        f"a quantized model, or one in GGUF, must fit in memory, {needed:,} bytes (--witness-memory)"
        if needed > subject.memory_limit
        else ""
    )


def read_golden(golden: Path, config_folder: Path, tokenizer: Path | None) -> recorded.Recorded:
    """Read recorded logits, as far as a config can judge them.

    Args:
        golden: the file.
        config_folder: holds the model's config.json.
        tokenizer: folder of a tokenizer, or None.

    Returns:
        Ids and logits.

    Raises:
        FormatError: the file cannot be this model's.
    """
    vocab, max_position = limits_of(config_folder)
    return recorded.read_recorded(golden, vocab=vocab, reachable=reachable_ids(config_folder, tokenizer), max_position=max_position)


def not_compared(subject: Subject, why: str) -> LogitsComparison:
    """Return the comparison of a release that could not be run: no position, so that its check fails.

    Args:
        subject: what should have been compared.
        why: what transformers said.

    Returns:
        A comparison without metrics.
    """
    row = subject.cast_row
    return LogitsComparison("cast", "merged values", f"release ({why})", row, 0, {}, {})


def _describe(golden: recorded.Recorded | None) -> str:
    if golden is None:
        return "no recorded logits given (--golden)"
    rows, length = golden.input_ids.shape
    return f"{rows} rows of {length} tokens, recorded by the trainer in {golden.computed_in}"


def _hear_framework(subject: Subject) -> tuple[framework.Framework | None, pd.DataFrame | None, Witness]:
    proves = ("bytes", "mapping")
    try:
        # Quantized parameters are not bit-equal to anything of the source; the merged ones are, before they were quantized.
        folder, dtype = (subject.merged, subject.source_dtype) if subject.is_decoded else (subject.release, subject.release_dtype)
        live = framework.Framework(subject.source_format, subject.source_roots, folder, subject.memory_limit)
        values = live.compare_parameters(folder, DTYPES[dtype])
    except NotHeardError as reason:
        return None, None, Witness(framework.NAME, False, proves, str(reason))
    heard = f"torch's own loader filled transformers' own model; {len(values)} parameters compared"
    return live, values, Witness(framework.NAME, True, proves, heard)


def _hear_native(subject: Subject, golden: recorded.Recorded | None, run: _Run) -> LogitsEvidence:
    # What the ranks themselves compute, held against the recording and against the merged values; nothing for sources without ranks.
    if subject.source_format not in native_shards.FORMATS:
        return LogitsEvidence()
    try:
        native = native_forward.run_native(subject.source_format, subject.source_roots, [batch.input_ids for batch in run.batches])
    except NotHeardError as reason:
        return _silent(str(reason))
    comparisons = []
    if golden is not None:
        recording = replace(run, logits=native.logits)
        comparisons.append(replace(_compare_recorded(subject, golden, recording), candidate=native_forward.NAME))
        if not is_within(comparisons[0]):
            found = comparisons[0].metrics["max_abs"]
            return _silent(f"its logits are up to {found:.3g} from the recorded ones, so it does not know all that this run computes")
    heard = f"{sum(batch.input_ids.numel() for batch in run.batches)} tokens, run through the ranks' own tensors"
    witness = Witness(native_forward.NAME, True, ("mapping",), heard)
    return LogitsEvidence((*comparisons, _compare_native(subject, native, run)), (witness,))


def _silent(reason: str) -> LogitsEvidence:
    return LogitsEvidence(witnesses=(Witness(native_forward.NAME, False, ("mapping",), reason),))


def _compare_native(subject: Subject, native: native_forward.Native, run: _Run) -> LogitsComparison:
    # fp32 holds the source's values exactly, and both forwards run in it; but the ranks' are no masters.
    row = limits_row("", "BF16" if subject.of_masters else "", "F32", is_moe=subject.is_moe)
    noise = _NATIVE_NOISE * max(float(logits.abs().max()) for logits in native.logits)
    found = diverge(native.logits, run.logits, vocab=run.reachable, noise=noise)
    comparison = _comparison("mapping", native_forward.NAME, "merged values", row, found, LIMITS[row])
    if is_within(comparison):
        return comparison
    hidden = _hidden(subject.merged, run.batches[0], subject)
    own = tuple(state[:1] for state in native.hidden[0])
    return replace(comparison, first_diverging_layer=first_diverging_layer(own, hidden, tolerance=_NATIVE_NOISE))


def _run(folder: Path, batches: Sequence[Batch], subject: Subject) -> tuple[torch.Tensor, ...]:
    with open_model(folder, subject.room) as model:
        return tuple(model.run(batch.input_ids).logits for batch in batches)


def _hidden(folder: Path, batch: Batch, subject: Subject) -> tuple[torch.Tensor, ...]:
    with open_model(folder, subject.room) as model:
        return model.run(batch.input_ids[:1], hidden=True).hidden


def _compare_recorded(subject: Subject, golden: recorded.Recorded, run: _Run) -> LogitsComparison:
    row = subject.recorded_row(golden.computed_in)
    noise = _EPS[golden.computed_in] * float(golden.logits.abs().max())
    found = diverge([golden.logits], [run.logits[-1]], vocab=min(golden.vocab, run.reachable), noise=noise)
    return _comparison("mapping", "recorded logits", "merged values", row, found, LIMITS[row])


def _compare_framework(subject: Subject, live: framework.Framework, run: _Run) -> LogitsComparison:
    row = limits_row("", "", "F32", is_moe=subject.is_moe)  # fp32 holds the source's values exactly, and both forwards run in it
    reference = [live.run(batch.input_ids)[0] for batch in run.batches]
    noise = _EPS["F32"] * max(float(logits.abs().max()) for logits in reference)
    found = diverge(reference, run.logits, vocab=run.reachable, noise=noise)
    comparison = _comparison("mapping", "framework's live model", "merged values", row, found, LIMITS[row])
    if comparison.metrics["max_abs"] == 0:
        return comparison
    ids = run.batches[0].input_ids[:1]
    layer = first_diverging_layer(live.run(ids)[1], _hidden(subject.merged, run.batches[0], subject))
    return replace(comparison, first_diverging_layer=layer)


def _compare_cast(subject: Subject, run: _Run) -> LogitsComparison:
    honest = _write_honest(subject, subject.scratch / "honest-cast")
    try:
        floor = diverge(run.logits, _run(honest, run.batches, subject), vocab=run.reachable, noise=0.0)
        found = diverge(run.logits, _run(subject.release, run.batches, subject), vocab=run.reachable, noise=floor.metrics["max_abs"])
        row = subject.cast_row
        limits = cast_limits(row, floor.metrics["mean_kl"])
        comparison = _comparison("cast", "merged values", "release", row, found, limits, noise_floor=floor.metrics["mean_kl"])
        if is_within(comparison):
            return comparison
        layer = first_diverging_layer(_hidden(honest, run.batches[0], subject), _hidden(subject.release, run.batches[0], subject))
        return replace(comparison, first_diverging_layer=layer)
    finally:
        shutil.rmtree(honest)


def _write_honest(subject: Subject, folder: Path) -> Path:
    # The same cast, or the same quantization, made by other means.
    if subject.gguf:
        return write_honest_gguf(subject.merged, subject.release, folder)
    if subject.encodings:
        return write_honest_quantization(subject.merged, subject.release, subject.encodings, folder)
    return write_honest_cast(subject.merged, subject.release, folder)


def _repeat(subject: Subject, run: _Run) -> LogitsComparison:
    found = diverge(run.logits, _run(subject.release, run.batches, subject), vocab=run.reachable, noise=0.0)
    row = subject.cast_row
    return _comparison("cast", "merged values (nothing is cast)", "release, run again", row, found, cast_limits(row, 0.0))


def _comparison(
    name: Literal["mapping", "cast"],
    reference: str,
    candidate: str,
    row: str,
    found: Divergence,
    limits: Mapping[str, float],
    **measured: float,
) -> LogitsComparison:
    metrics = {**found.metrics, **measured}
    return LogitsComparison(name, reference, candidate, row, found.positions, metrics, dict(limits), found.kl_by_position)


def is_within(comparison: LogitsComparison) -> bool:
    """Say whether every limited metric is within its limit; NaN is not.

    Args:
        comparison: with its limits.

    Returns:
        False as soon as one is not.
    """
    metrics, limits = comparison.metrics, dict(comparison.limits)
    if metrics["top1_positions"] < TOP1_POSITIONS:
        limits.pop("top1", None)  # too few positions to say anything
    return all(metrics[key] <= limits[key] for key in limits.keys() & UPPER) and all(
        metrics[key] >= limits[key] for key in limits.keys() & LOWER
    )
