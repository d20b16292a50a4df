"""The weights are such as training makes of an earlier release: same names and shapes, sizes of values that moved together.

Only for an earlier release with other weights; where the weights must be the same, `values` compares them one by one. Training moves
a matrix's rms by percents. One that moves by a factor while the others of its role do not was damaged, or never loaded.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from reports.errors import name_some
from validators.check import Check, Judgement, Outcome, judge
from validators.expectation import Evidence
from validators.measured import Measured, by_role, measured_rows
from validators.policy import DRIFT_FACTOR
from validators.quantization import read_quantization
from validators.release import Release, open_release

Pair = tuple[Measured, Measured]  # ours, the earlier release's


def examine(evidence: Evidence) -> Outcome:
    """Hold the release's tensors against those of an earlier one.

    Args:
        evidence: a measured release and a measured reference.

    Returns:
        Findings, and the number of judgements made.
    """
    assert evidence.reference is not None
    aside = _quantized_names(evidence.release) | _quantized_names(open_release(evidence.reference.folder))
    ours = {row.name: row for row in measured_rows(evidence.tensors) if row.name not in aside}
    theirs = {row.name: row for row in measured_rows(evidence.reference.tensors) if row.name not in aside}
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]
    tables = {evidence.expected.embedding, evidence.expected.head} if evidence.expected else set()
    judgements = [
        *_judge_names(ours, theirs),
        *(_judge_shape(pair, is_table=pair[0].name in tables) for pair in pairs),
        *_judge_sizes([pair for pair in pairs if pair[0].shape == pair[1].shape]),
        *_judge_unchanged(pairs),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"earlier": evidence.reference.folder.name, "compared": len(pairs)})


def _quantized_names(release: Release) -> frozenset[str]:
    # Of a weight that either release quantizes, neither its parts nor the whole can be held against the other's.
    said = read_quantization(release)
    return said.encoded | said.weights.keys() if said.method else frozenset()


def _judge_names(ours: Mapping[str, Measured], theirs: Mapping[str, Measured]) -> Iterator[Judgement]:
    rows = (("weights_drift.lost", theirs.keys() - ours.keys()), ("weights_drift.added", ours.keys() - theirs.keys()))
    for code, names in rows:
        found = f"{len(names)}: {name_some(sorted(names))}"
        yield judge(code, "tensors", right=not names, expected="the names of the earlier release", found=found)


def _judge_shape(pair: Pair, *, is_table: bool) -> Judgement:
    ours, earlier = pair
    code = "weights_drift.vocabulary" if is_table else "weights_drift.shape"
    return judge(code, ours.name, right=ours.shape == earlier.shape, expected=earlier.shape, found=ours.shape)


def _judge_sizes(pairs: Sequence[Pair]) -> Iterator[Judgement]:
    moved = {ours.name: _factor(ours, earlier) for ours, earlier in pairs if "x" in ours.shape}
    for role, rows in by_role([ours for ours, _ in pairs if ours.name in moved]).items():
        usual = statistics.median(moved[row.name] for row in rows)
        for row in rows:
            alone = len(rows) > 1 and abs(math.log(usual)) < math.log(DRIFT_FACTOR) / 2
            code = "weights_drift.rms" if alone or not row.rms else "weights_drift.rms-of-role"
            right = 1 / DRIFT_FACTOR < moved[row.name] < DRIFT_FACTOR
            found = f"{moved[row.name]:.3g} times the earlier rms, {role} usually {usual:.3g}"
            yield judge(code, row.name, right=right, expected=f"less than a factor of {DRIFT_FACTOR:g}", found=found)


def _factor(ours: Measured, earlier: Measured) -> float:
    # Of two all-zero tensors none moved; tiny stands for zero, so that the logarithm exists.
    return 1.0 if ours.rms == earlier.rms else max(ours.rms, 1e-30) / max(earlier.rms, 1e-30)


def _judge_unchanged(pairs: Sequence[Pair]) -> Iterator[Judgement]:
    matrices = [(ours, earlier) for ours, earlier in pairs if "x" in ours.shape and ours.is_telling]
    alike = [ours.name for ours, earlier in matrices if ours.signature == earlier.signature]
    if matrices:
        found = f"{len(alike)} of {len(matrices)} matrices are those of the earlier release: {name_some(alike)}"
        yield judge("weights_drift.unchanged", "tensors", right=not alike, expected="weights that were trained on", found=found)


CHECK = Check("weights_drift", ("bytes", "earlier"), examine)
