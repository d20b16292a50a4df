"""Quantized weights are whole and as the config says: each with the parts of its scheme, scales that scale, nothing quantized by mistake.

Declared and stored are held against each other module by module. What only a reference shows (a scale of another tensor, a zero point off
by one) is bounded by the encoding's own error. Which linear layers a class target means is known by name alone, so a weight stored whole
is an error only where its module is named, its siblings are quantized, or its name is that of a linear layer.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import pandas as pd

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding, Measure
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.layouts import LARGEST_E4M3, MAIN_SCALES, NAMED_PARTS, PartRow, Scheme, Shape, layout_rows
from validators.measured import is_norm, role_of
from validators.policy import CALIBRATED_SLACK, ENCODING_ERRORS, LARGEST_WEIGHT, ROUNDING_SLACK, UNQUANTIZED
from validators.quantization import EMBEDDINGS, Quantization, QuantizedWeight, read_quantization
from validators.release import StoredTensor
from validators.tables import format_shape, parse_shape

_WHERE = "config.json: quantization_config"
_LINEAR_NAME = re.compile(r"(^|\.)(\w*_proj|w[123]|lm_head)$")  # linear layers of every family that has modules of these names
_ROUTER_NAME = re.compile(r"\.(mlp|block_sparse_moe|moe|feed_forward)\.(gate|router)$|\.shared_expert_gate$|\.router(\.\w+)?$")
_ATTENTION = re.compile(r"^(.*\.(?:layers|h)\.\d+\.\w*attn\w*)\.")


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a PartTable."""

    name: str
    low: float
    high: float
    nonfinite: int
    listed: str
    relative_error: float
    rounding: float


def examine(evidence: Evidence) -> Outcome:
    """Judge everything that is quantized, and everything that should be.

    Args:
        evidence: headers and config; expectation, PartTable and plan where there are some.

    Returns:
        Findings, and the number of weights judged; of a release without quantization, of tensors.
    """
    said = read_quantization(evidence.release)
    rows = {row.name: row for row in _rows(evidence.parts)}
    weights = list(said.weights.values())
    findings = [
        *_judge_declaration(said),
        *(found for weight in weights for found in _judge_weight(weight, said, evidence, rows)),
        *_judge_whole(evidence, said),
        *_judge_ignored(evidence, said),
        *_judge_cache(evidence, said, rows),
    ]
    measured: dict[str, Measure] = {"method": said.method or "none", "weights": len(weights), "parts": len(said.encoded)}
    errors = [row.relative_error for row in rows.values() if not math.isnan(row.relative_error)]
    if errors:
        measured["largest_relative_error"] = max(errors)
    return Outcome(tuple(findings), len(weights) or sum(1 for _ in evidence.release.stored()), measured)


def _rows(table: pd.DataFrame | None) -> list[_Row]:
    if table is None:
        return []
    return [_Row(*row) for row in zip(*(table[field.name].tolist() for field in fields(_Row)), strict=True)]


def _judge_declaration(said: Quantization) -> Iterator[Finding]:
    if said.unreadable:
        yield finding("quantized.config-unreadable", _WHERE, expected="targets and a known scheme", found=said.unreadable)
    elif said.unjudged:
        yield finding("quantized.not-judged", _WHERE, expected="compressed-tensors or fp8", found=said.unjudged)
    elif any(group.scheme for group in said.groups) and not said.weights:
        yield finding("quantized.nothing", _WHERE, expected="quantized weights", found="none")
    elif not said.is_compressed and said.weights:
        yield finding("quantized.status", f"{_WHERE}.quantization_status", expected="compressed", found=said.status)
    for weight in [] if said.method else said.weights.values():
        parts = name_some(f"{tensor.name} {tensor.dtype}" for tensor in weight.parts.values())
        yield finding("quantized.undeclared", weight.name, expected="a quantization_config", found=parts)


def _judge_weight(weight: QuantizedWeight, said: Quantization, evidence: Evidence, table: Mapping[str, _Row]) -> list[Finding]:
    found = [
        *_judge_choice(weight, said),
        *_judge_parts(weight, said),
        *_judge_shapes(weight, evidence, table),
        *_judge_values(weight, table),
    ]
    error = list(_judge_error(weight, evidence, table))
    return found + [each for each in error if not found or each.code != "quantized.not-compared"]


def _judge_choice(weight: QuantizedWeight, said: Quantization) -> Iterator[Finding]:
    # Should this weight be quantized at all?
    if not said.method or said.unreadable or said.unjudged:
        return
    module, found = weight.module, name_some(weight.parts)
    by_name = any(said.matches(target, module) for group in said.groups for target in group.targets)
    if said.is_ignored(module):
        yield finding("quantized.ignored", weight.name, expected="stored whole", found=found)
    elif _is_norm(module) or (not by_name and _ROUTER_NAME.search(module)):
        yield finding("quantized.must-not", weight.name, expected="stored whole", found=found)
    elif weight.scheme is None:
        code = "quantized.must-not" if module.rpartition(".")[2] in EMBEDDINGS else "quantized.untargeted"
        yield finding(code, weight.name, expected="stored whole", found=found)
    elif not weight.scheme.layout:
        yield finding("quantized.not-judged", weight.name, expected="a format that is judged", found=f"format {weight.scheme.format!r}")


def _is_norm(module: str) -> bool:
    return is_norm(f".{module.rpartition('.')[2]}")  # its own name, not that of a block it lies in


def _judge_parts(weight: QuantizedWeight, said: Quantization) -> Iterator[Finding]:
    for suffix in NAMED_PARTS.get(said.method, ()):
        if suffix not in weight.parts:
            yield finding("quantized.part-missing", weight.name, expected=suffix, found=name_some(weight.parts))
    known = _known_rows(weight)
    if known is None:
        return
    scheme, rows = known
    for suffix, row in rows.items():
        if suffix not in weight.parts and row.is_required(scheme):
            yield finding("quantized.part-missing", weight.name, expected=suffix, found=name_some(weight.parts))
    for suffix, tensor in weight.parts.items():
        if suffix not in rows:
            yield finding("quantized.part-unexpected", tensor.name, expected=name_some(rows), found=suffix)
        elif (dtypes := rows[suffix].dtypes(scheme)) and tensor.dtype not in dtypes:
            yield finding("quantized.dtype", tensor.name, expected=" or ".join(sorted(dtypes)), found=tensor.dtype)


def _known_rows(weight: QuantizedWeight) -> tuple[Scheme, Mapping[str, PartRow]] | None:
    return (weight.scheme, layout_rows(weight.scheme)) if weight.scheme is not None and weight.scheme.layout else None


def _judge_shapes(weight: QuantizedWeight, evidence: Evidence, table: Mapping[str, _Row]) -> Iterator[Finding]:
    known = _known_rows(weight)
    shape = _weight_shape(weight, evidence, table)
    if known is None or shape is None or len(shape) != 2:
        return
    scheme, rows = known
    for suffix, row in rows.items():
        tensor = weight.parts.get(suffix)
        allowed = row.shapes(scheme, shape)
        if tensor is None:
            continue
        if allowed and tensor.shape not in allowed:
            code = "quantized.transposed" if tensor.shape[::-1] in allowed else "quantized.shape"
            yield finding(code, tensor.name, expected=f"{allowed[0]} for a weight of {shape}", found=f"{tensor.shape}")
        listed = table.get(tensor.name)
        if row.part == "shape" and listed is not None and listed.listed != format_shape(shape):
            yield finding("quantized.listed-shape", tensor.name, expected=format_shape(shape), found=listed.listed)


def _weight_shape(weight: QuantizedWeight, evidence: Evidence, table: Mapping[str, _Row]) -> Shape | None:
    # From the model; else from the part that is as large as the weight; else as the weight itself writes it down.
    if evidence.expected is not None and weight.name in evidence.expected.quantized:
        return evidence.expected.quantized[weight.name]
    if weight.main is not None and weight.scheme is not None and weight.scheme.layout != "packed":
        return weight.main.shape
    written = weight.parts.get("weight_shape")
    listed = table.get(written.name) if written is not None else None
    return parse_shape(listed.listed) if listed is not None and listed.listed else None


def _judge_values(weight: QuantizedWeight, table: Mapping[str, _Row]) -> Iterator[Finding]:
    known = _known_rows(weight)
    scheme, rows = known if known is not None else (Scheme("", ""), {})
    half = 2 ** (scheme.bits - 1)
    for suffix, tensor in weight.parts.items():
        row = table.get(tensor.name)
        if row is None or suffix not in rows:
            continue
        if rows[suffix].part == "scale":
            yield from _judge_scale(row)
            yield from _judge_size(row, scheme) if suffix in MAIN_SCALES else ()
        elif rows[suffix].part == "zero" and (row.low < -half or row.high >= half):
            yield finding("quantized.zero-point", row.name, expected=f"{-half} to {half - 1}", found=f"{row.low:g} to {row.high:g}")


def _judge_scale(row: _Row) -> Iterator[Finding]:
    if row.nonfinite:
        yield finding("quantized.scale-nonfinite", row.name, expected="0", found=f"{row.nonfinite} scales are NaN or infinite")
    if row.low <= 0:
        yield finding("quantized.scale-sign", row.name, expected="above zero", found=f"{row.low:g} to {row.high:g}")


def _judge_size(row: _Row, scheme: Scheme) -> Iterator[Finding]:
    # Sound scales let a weight reach its own largest value; inverted ones of fp8 and int8 let it reach thousands.
    reach = row.high * (LARGEST_E4M3 if scheme.kind == "float" else 2 ** (scheme.bits - 1))
    if reach > LARGEST_WEIGHT:
        yield finding("quantized.scale-size", row.name, expected=f"weights up to {LARGEST_WEIGHT:g}", found=f"up to {reach:.3g}")


def _judge_error(weight: QuantizedWeight, evidence: Evidence, table: Mapping[str, _Row]) -> Iterator[Finding]:
    known, row = _known_rows(weight), table.get(weight.main.name) if weight.main is not None else None
    if known is None or row is None or evidence.plan is None or evidence.values is None:
        return
    if math.isnan(row.relative_error):
        yield finding("quantized.not-compared", row.name, expected="an error against the source", found="none could be computed")
        return
    scheme = known[0]
    rounding = ROUNDING_SLACK * row.rounding if scheme.kind == "int" else 0.0
    limit = max(ENCODING_ERRORS.get((scheme.kind, scheme.bits), 0.0), 0.0 if math.isnan(rounding) else rounding)
    slack = CALIBRATED_SLACK if scheme.bits < 8 else 1.0
    if row.relative_error > limit:
        code = "quantized.error" if row.relative_error > slack * limit else "quantized.calibrated-error"
        yield finding(code, row.name, expected=f"at most {limit:.3g} of the rms", found=f"{row.relative_error:.3g}")


def _judge_whole(evidence: Evidence, said: Quantization) -> Iterator[Finding]:
    # Weights stored whole that the config wants quantized.
    if not said.method or said.unjudged or said.unreadable:
        return
    quantized_roles = {role_of(name) for name in said.weights}
    for tensor in evidence.release.stored():
        module, _, suffix = tensor.name.rpartition(".")
        if suffix != "weight" or tensor.name in said.encoded or tensor.dtype not in UNQUANTIZED or said.is_ignored(module):
            continue
        group = said.group_of(module)
        if group is None or group.scheme is None or len(tensor.shape) != 2 or _is_norm(module) or _ROUTER_NAME.search(module):
            continue
        named = any(target != "Linear" and said.matches(target, module) for target in group.targets)
        is_strict = said.method == "compressed-tensors" and _LINEAR_NAME.search(module)
        if named or role_of(tensor.name) in quantized_roles or is_strict:
            yield finding(
                "quantized.not-quantized", tensor.name, expected=f"quantized ({group.scheme.format})", found=f"{tensor.dtype} whole"
            )


def _judge_ignored(evidence: Evidence, said: Quantization) -> Iterator[Finding]:
    if said.unreadable or said.unjudged:
        return
    names = [tensor.name for tensor in evidence.release.stored()]
    modules = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    absent = {alias.rpartition(".")[0] for _, alias in evidence.expected.tied} if evidence.expected is not None else {"lm_head"}
    for pattern in said.ignored:
        is_class, is_plain = pattern[:1].isupper(), said.is_plain(pattern)
        if is_class or pattern in absent or pattern in modules:
            continue
        if not is_plain and any(said.matches(pattern, module) for module in modules):
            continue
        code = "quantized.ignore-unmatched" if is_plain else "quantized.pattern-unmatched"
        yield finding(code, f"{_WHERE}.ignore", expected="a module of this release", found=pattern)


def _judge_cache(evidence: Evidence, said: Quantization, table: Mapping[str, _Row]) -> Iterator[Finding]:
    rows = [table[name] for name in sorted(said.cache) if name in table]
    for row in rows:
        yield from _judge_scale(row)
    if rows and all(row.low == row.high == 1.0 for row in rows):
        yield finding("quantized.cache-ones", rows[0].name, expected="calibrated scales", found=f"all {len(rows)} are one")
    if not said.has_cache:
        return
    layers = {match[1] for tensor in evidence.release.stored() if (match := _ATTENTION.match(tensor.name))}
    lost = [layer for layer in sorted(layers) if not _has_both(layer, list(said.cache.values()))]
    if lost or not layers:
        found = f"absent in {name_some(lost)}" if layers else "no attention layer"
        yield finding("quantized.cache-missing", f"{_WHERE}.kv_cache_scheme", expected="k_scale and v_scale in every layer", found=found)


def _has_both(layer: str, cache: Sequence[StoredTensor]) -> bool:
    held = [tensor.name.removeprefix(f"{layer}.") for tensor in cache if tensor.name.startswith(f"{layer}.")]
    keys, values = (any(name.startswith((letter, "kv_scale")) for name in held) for letter in "kv")
    return keys and values


CHECK = Check("quantized", ("headers",), examine)
