"""Every value is finite, and no tensor is empty of information: all zero, or one value throughout.

A statistic is judged layer against layer: a constant tensor is an error when others of its role (the same name in other layers) are not
constant. Norms of all ones, biases and scalars of zero are normal where every layer has them. A matrix of zeros is an error, unless it is
so in every layer and an exact comparison says that the source has it too (some models start a projection at zero). Quantized weights are
judged by what they are stored as, whatever the scales, which every zero and every constant shows in as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.measured import Measured, by_role, compared_rows, is_norm, measured_rows
from validators.quantization import QuantizedWeight, read_quantization

# By bits, the int32 word of packed zeros: each is stored as half of its range.
_ZERO_WORDS: Mapping[int, int] = MappingProxyType({4: 0x88888888 - 2**32, 8: 0x80808080 - 2**32})


def examine(evidence: Evidence) -> Outcome:
    """Judge the statistics of every tensor.

    Args:
        evidence: a TensorTable; the expectation where there is one.

    Returns:
        Findings, and the number of tensors judged.
    """
    rows = measured_rows(evidence.tensors)
    said = read_quantization(evidence.release)
    mains = {weight.main.name: weight for weight in said.weights.values() if weight.main is not None}
    told = [row for row in rows if row.name not in said.aside and not _is_one_per_scale(mains.get(row.name), evidence)]
    groups = by_role(_as_values(row, mains.get(row.name)) for row in told).values()
    kept = evidence.expected.keep_fp32 if evidence.expected else frozenset()
    proven = frozenset(row.name for row in compared_rows(evidence.values) if row.differing == 0)
    findings = [
        *(found for row in rows for found in _judge_finite(row)),
        *(found for group in groups for found in _judge_zero(group, kept, proven)),
        *(found for group in groups for found in _judge_constant(group)),
    ]
    measured = {
        "nonfinite": sum(row.nonfinite for row in rows),
        "absmax": max((row.absmax for row in rows if row.name not in said.encoded), default=float("nan")),  # stored codes are no weights
        "all_zero": sum(row.is_zero for row in rows),
        "constant": sum(row.constant for row in rows),
    }
    return Outcome(tuple(findings), len(rows), measured, {"nonfinite": 0})


def _is_one_per_scale(weight: QuantizedWeight | None, evidence: Evidence) -> bool:
    # Each value is the largest of its scale then, and all are stored alike.
    if weight is None or weight.main is None or weight.scheme is None:
        return False
    whole = evidence.expected.quantized.get(weight.name, weight.main.shape) if evidence.expected else weight.main.shape
    return weight.scheme.block[1] == 1 or (weight.scheme.block == (1, 0) and whole[-1:] == (1,))


def _as_values(row: Measured, weight: QuantizedWeight | None) -> Measured:
    # Packed values are stored with half their range added, so a word of zeros is none of zero bits, and one of zero bits none of zeros.
    scheme = weight.scheme if weight is not None else None
    if scheme is None or scheme.layout != "packed" or not scheme.is_symmetric or not row.constant or scheme.bits not in _ZERO_WORDS:
        return row
    return replace(row, zero_share=float(row.mean < 0 and row.absmax == -_ZERO_WORDS[scheme.bits]))


def _judge_finite(row: Measured) -> Iterator[Finding]:
    if row.nonfinite:
        yield finding("finite.nonfinite", row.name, expected="0", found=f"{row.nonfinite} of {row.numel} are NaN or infinite")


def _judge_zero(group: Sequence[Measured], kept: frozenset[str], proven: frozenset[str]) -> Iterator[Finding]:
    zero = [row for row in group if row.is_zero]
    stands_out = len(zero) < len(group)
    for row in zero:
        found = f"{row.numel} zeros; {len(group) - len(zero)} of {len(group)} of this role are not zero"
        if row.name.endswith("bias") or row.numel == 1:
            if stands_out or row.name in kept:
                yield finding("finite.zero-bias", row.name, expected="values", found=found)
        else:
            code = "finite.all-zero" if stands_out or row.name not in proven else "finite.source-zero"
            yield finding(code, row.name, expected="values", found=found)


def _judge_constant(group: Sequence[Measured]) -> Iterator[Finding]:
    constant = [row for row in group if row.constant and not row.is_zero]
    varied = sum(not row.constant and not row.is_zero for row in group)
    for row in constant:
        value = f"{row.numel} times {row.mean:.6g}"
        if varied:
            found = f"{value}; {varied} of {len(group)} of this role vary"
            yield finding("finite.constant-outlier", row.name, expected="values that vary", found=found)
        elif not _is_fresh_norm(row):
            yield finding("finite.constant", row.name, expected="values that vary", found=value)


def _is_fresh_norm(row: Measured) -> bool:
    return is_norm(row.name) and row.absmax == 1.0 and row.mean == 1.0


CHECK = Check("finite", ("bytes",), examine)
