"""Tensors that look never trained, or lost on the way, beside the others of their role: norms first, then the size and shape of matrices.

A norm's *lean* is the share of its sampled values above zero. Gammas start at one and stay positive, so it is near 1; exported without
the 1 that a zero-centred trainer adds, it is a half or less. A matrix *stands out* when its rms is a multiple of its neighbours' and of the
median over the layers (or over the experts of its layer); it is *fresh* when its largest value is what random numbers of its count give,
while its siblings, as trained matrices do, have larger ones.

All of it is heuristic and only said, but for two things beyond doubt: a family that centres on one, whose norms together centre on zero;
and zeros in a part of a matrix (validators.zero_shares).
The first and the last layer differ honestly, and have a wider factor; hybrid models differ by kind of layer, so nothing is said when more
than a few stand out. Zero biases and constant tensors are the finite check's.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from reports.codes import finding
from reports.model import Finding, Measure
from validators.check import Check, Outcome
from validators.config import read_field
from validators.expectation import Evidence
from validators.measured import Measured, compared_rows, measured_rows, role_of
from validators.policy import OUTLIER_FACTORS, OUTLIER_SPREADS, STRAIGHT_LEAN, UNQUANTIZED, ZERO_CENTRED_LEAN
from validators.quantization import encoded_names
from validators.sampled import read_samples, sample_values
from validators.siblings import index_places
from validators.tables import parse_shape
from validators.zero_shares import judge_zeros

# Families by what their norms multiply with: the weight itself, or 1 + weight. Source: transformers 5.24, modeling files.
ONE_CENTRED = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2", "gpt_neox"),
        *(
            "phi",
            "phi3",
            "olmo2",
            "olmo3",
            "olmoe",
            "granite",
            "granitemoe",
            "glm4",
            "glm4_moe",
            "falcon",
            "opt",
            "bloom",
            "stablelm",
            "gpt_oss",
        ),
    }
)
ZERO_CENTRED = (
    "gemma",
    "recurrent_gemma",
    "t5gemma",
    "vaultgemma",
    "paligemma",
    "qwen3_next",
    "qwen3_5",
    "nemotron",
    "minimax_m3",
    "step3p7",
)

_FEWEST = 4  # siblings from which a median says something
_LARGEST_SHARE = 0.05  # of siblings that may stand out; more are a kind of layer of their own
_UNIFORM_PEAKS = (1.70, 1.7321)  # absmax over rms of many uniform numbers: at most the root of 3
_TRAINED_PEAK = 1.8  # trained siblings have at least this multiple


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm's weight: `lean` is its share of positive sampled values, NaN where there are none."""

    row: Measured
    lean: float

    @property
    def is_untouched(self) -> bool:
        return bool(self.row.constant) and self.row.mean == 1.0


def examine(evidence: Evidence) -> Outcome:
    """Judge norms and matrices against the others of their role.

    Args:
        evidence: a TensorTable; config and a ValueTable where there are some.

    Returns:
        Findings, and the number of tensors looked at.
    """
    assert evidence.tensors is not None
    encoded, samples = encoded_names(evidence.release), read_samples(evidence.tensors)
    rows = [row for row in measured_rows(evidence.tensors) if row.name not in encoded]
    norms: dict[str, list[_Norm]] = defaultdict(list)
    for row in rows:
        if _is_norm(row):
            norms[role_of(row.name)].append(_Norm(row, _lean(samples[row.name], row.dtype)))
    groups = list(_matrix_groups(rows))
    findings = [
        *_judge_leans(norms, evidence),
        *_judge_untouched(norms),
        *(found for group, along in groups for found in _judge_sizes(group, along)),
        *(found for group, _ in groups for found in _judge_fresh(group)),
        *judge_zeros(rows, samples, {row.name for row in compared_rows(evidence.values) if row.differing == 0}),
    ]
    leans = [norm.lean for group in norms.values() for norm in group if not math.isnan(norm.lean)]
    measured: dict[str, Measure] = {"norms": len(leans), "matrix_groups": len(groups)}
    if leans:
        measured["median_norm_lean"] = median(leans)
    return Outcome(tuple(findings), len(rows), measured)


def _is_norm(row: Measured) -> bool:
    name = row.name.lower()
    return name.endswith(".weight") and len(parse_shape(row.shape)) == 1 and ("norm" in name or ".ln_" in name)


def _lean(sample: bytes, dtype: str) -> float:
    values = sample_values(sample, dtype)
    return float((values > 0).mean()) if len(values) else math.nan


def _judge_leans(norms: Mapping[str, Sequence[_Norm]], evidence: Evidence) -> Iterator[Finding]:
    family = str(read_field(evidence.release.config, "model_type") or "")
    if family.startswith(ZERO_CENTRED):
        return
    varied = {role: [norm for norm in group if not (norm.row.constant or math.isnan(norm.lean))] for role, group in norms.items()}
    every = [norm for group in varied.values() for norm in group]
    if len(every) > 1 and median(norm.lean for norm in every) < ZERO_CENTRED_LEAN:
        proven = {row.name for row in compared_rows(evidence.values) if row.differing == 0}
        certain = family in ONE_CENTRED and not proven.issuperset(norm.row.name for norm in every)
        found = f"half of {len(every)} norms have at most {median(norm.lean for norm in every):.0%} of their values above zero"
        yield finding("outliers.norms-centred" if certain else "outliers.norm-lean", "norms", expected="gammas around one", found=found)
        return
    for role, group in varied.items():
        if len(group) >= _FEWEST and median(norm.lean for norm in group) < ZERO_CENTRED_LEAN:
            found = f"half of {len(group)} have at most {median(norm.lean for norm in group):.0%} of their values above zero"
            yield finding("outliers.norm-lean", role, expected="gammas around one, as in other norms", found=found)
        else:
            yield from _judge_neighbours(group)


def _judge_neighbours(group: Sequence[_Norm]) -> Iterator[Finding]:
    ordered = sorted(group, key=lambda norm: _indices(norm.row.name))
    for before, norm, after in zip(ordered, ordered[1:], ordered[2:], strict=False):  # each with a neighbour on both sides
        if norm.lean < ZERO_CENTRED_LEAN and min(before.lean, after.lean) >= STRAIGHT_LEAN:
            found = f"{norm.lean:.0%} of its values are above zero; before {before.lean:.0%}, after {after.lean:.0%}"
            yield finding("outliers.norm-lean", norm.row.name, expected="a gamma around one, as its neighbours", found=found)


def _judge_untouched(norms: Mapping[str, Sequence[_Norm]]) -> Iterator[Finding]:
    moved = [role for role, group in norms.items() if not any(norm.row.constant for norm in group)]
    for role, group in norms.items():
        if moved and len(group) > 1 and all(norm.is_untouched for norm in group):
            found = f"exactly one in all {len(group)}, while {moved[0]} has moved"
            yield finding("outliers.norm-untouched", role, expected="trained values", found=found)


def _matrix_groups(rows: Sequence[Measured]) -> Iterator[tuple[list[Measured], str]]:
    # Siblings over the layers, in their order; of what has a second index, over that: the experts of one layer.
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for row in rows:
        places = index_places(row.name)
        is_matrix = len(parse_shape(row.shape)) > 1 and row.dtype in UNQUANTIZED
        if is_matrix and places and row.rms > 0 and not row.constant:
            parts = row.name.split(".")
            parts[places[-1]] = "*"
            groups[".".join(parts), "layers" if len(places) == 1 else "experts"].append(row)
    for (_, along), group in groups.items():
        if len(group) >= _FEWEST and len({(row.shape, row.dtype) for row in group}) == 1:
            yield sorted(group, key=lambda row: _indices(row.name)), along


def _judge_sizes(group: Sequence[Measured], along: str) -> Iterator[Finding]:
    sizes = [math.log(row.rms) for row in group]
    middle = median(sizes)
    spread = OUTLIER_SPREADS * 1.4826 * median(abs(size - middle) for size in sizes)
    standing = []
    for at, (row, size) in enumerate(zip(group, sizes, strict=True)):
        is_edge = along == "layers" and at in (0, len(group) - 1)
        factor = OUTLIER_FACTORS["edge" if is_edge else along]
        beside = [sizes[i] for i in (at - 1, at + 1) if 0 <= i < len(group)] if along == "layers" else []
        gaps = [size - other for other in (middle, *beside)]
        one_side = min(gaps) > 0 or max(gaps) < 0
        if one_side and min(map(abs, gaps)) > math.log(factor) and abs(gaps[0]) > spread:
            standing.append((row, f"rms {row.rms:.4g}; the median of {len(group)} {along} is {math.exp(middle):.4g}"))
    if len(standing) <= max(1, _LARGEST_SHARE * len(group)):
        yield from (finding("outliers.rms", row.name, expected="about the size of its siblings", found=found) for row, found in standing)


def _judge_fresh(group: Sequence[Measured]) -> Iterator[Finding]:
    peaks = [row.absmax / row.rms for row in group]
    for kind, (low, high) in (("uniform", _UNIFORM_PEAKS), ("normal", _normal_peaks(group[0].numel))):
        fresh = [row for row, peak in zip(group, peaks, strict=True) if low <= peak <= high and _is_centred(row)]
        if len(fresh) <= max(1, _LARGEST_SHARE * len(group)) and median(peaks) > _TRAINED_PEAK * high:
            for row in fresh:
                found = f"largest value {row.absmax / row.rms:.3g} times the rms, as of {kind} random numbers; median {median(peaks):.3g}"
                yield finding("outliers.fresh", row.name, expected="trained values, as in its siblings", found=found)


def _normal_peaks(numel: int) -> tuple[float, float]:
    # Between which the largest magnitude of so many normal numbers lies, 19 times of 20. Source: their Gumbel limit.
    root = math.sqrt(2 * math.log(2 * numel))
    likeliest = root - (math.log(math.log(2 * numel)) + math.log(4 * math.pi)) / (2 * root)
    return likeliest - 2.5 / root, likeliest + 3 / root


def _is_centred(row: Measured) -> bool:
    return abs(row.mean) < 4 * row.rms / math.sqrt(row.numel)


def _indices(name: str) -> tuple[int, ...]:
    parts = name.split(".")
    return tuple(int(parts[at]) for at in index_places(name))


CHECK = Check("outliers", ("bytes",), examine)
