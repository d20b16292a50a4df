"""Every tensor has the shape the config implies and the dtype that was asked for.

Dtypes. One float dtype per release: the one requested; without a request the source's own, tensor by tensor as planned; without a plan
the one most elements have. Names on the expectation's keep-in-fp32 list are left alone by a cast. Parts of quantized weights are the
`quantized` check's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import FLOATS, Evidence, Expectation
from validators.quantization import encoded_names
from validators.release import Release, StoredTensor


def examine(evidence: Evidence) -> Outcome:
    """Compare shapes and dtypes of the tensors stored (or planned) with those expected.

    Args:
        evidence: headers and expectation; the plan where there is one.

    Returns:
        Findings, and the number of tensors whose shape was compared.
    """
    expected = evidence.expected
    assert expected is not None
    stored = [tensor for tensor in whole_tensors(evidence.release) if _expected_shape(tensor.name, expected) is not None]
    findings = [
        *(found for tensor in stored for found in _judge_shape(tensor, expected)),
        *_judge_dtypes(stored, _DtypeRule.of(evidence, stored)),
    ]
    numel = Counter[str]()
    for tensor in stored:
        numel[tensor.dtype] += prod(tensor.shape)
    return Outcome(tuple(findings), len(stored), {f"elements_{code}": count for code, count in sorted(numel.items())})


def whole_tensors(release: Release) -> list[StoredTensor]:
    """Return the stored tensors whose values mean something by themselves.

    Args:
        release: headers and config.

    Returns:
        All but parts of quantized weights, in the order stored.
    """
    encoded = encoded_names(release)
    return [tensor for tensor in release.stored() if tensor.name not in encoded]


def main_dtype(stored: Iterable[StoredTensor]) -> str:
    """Return the float dtype that most elements have.

    Args:
        stored: any tensors.

    Returns:
        A dtype code; "" where no tensor is a float.
    """
    numel = Counter[str]()
    for tensor in stored:
        if tensor.dtype in FLOATS:
            numel[tensor.dtype] += prod(tensor.shape)
    return max(sorted(numel), key=numel.__getitem__, default="")


def _expected_shape(name: str, expected: Expectation) -> tuple[int, ...] | None:
    if name in expected.shapes:
        return expected.shapes[name]
    return next((expected.shapes.get(kept) for kept, alias in expected.tied if alias == name), None)


def _judge_shape(tensor: StoredTensor, expected: Expectation) -> Iterator[Finding]:
    want = _expected_shape(tensor.name, expected)
    assert want is not None
    if tensor.shape == want:
        return
    vocabulary = {expected.embedding, expected.head, *(alias for _, alias in expected.tied)}
    code = "shapes.wrong"
    if len(want) >= 2 and tensor.shape == (*want[:-2], want[-1], want[-2]):
        code = "shapes.transposed"
    elif tensor.name in vocabulary and tensor.shape[1:] == want[1:] and tensor.shape:
        code = "shapes.vocabulary-padded" if tensor.shape[0] > want[0] else "shapes.vocabulary-short"
    yield finding(code, tensor.name, expected=f"{want}", found=f"{tensor.shape}")


@dataclass(frozen=True, slots=True)
class _DtypeRule:
    """What decides a tensor's dtype. `asked` is the request, `planned` and `encodings` the plan by name, `common` the fallback.
    `kept` are names that a cast leaves alone, `free` those that may be in fp32 whatever was asked.
    """

    asked: str
    planned: Mapping[str, str]
    encodings: Mapping[str, str]
    common: str
    kept: frozenset[str]
    free: frozenset[str]

    @classmethod
    def of(cls, evidence: Evidence, stored: list[StoredTensor]) -> "_DtypeRule":
        planned: Mapping[str, str] = {}
        encodings: Mapping[str, str] = {}
        if evidence.plan is not None:
            planned = dict(zip(evidence.plan["name"], evidence.plan["dtype"], strict=True))
            encodings = dict(zip(evidence.plan["name"], evidence.plan["encoding"], strict=True))
        kept = evidence.expected.keep_fp32 if evidence.expected else frozenset()
        free = evidence.expected.may_keep_fp32 if evidence.expected else frozenset[str]()
        return cls(evidence.dtype, planned, encodings, main_dtype(stored), kept, free)


def _judge_dtypes(stored: list[StoredTensor], rule: _DtypeRule) -> Iterator[Finding]:
    for tensor in stored:
        is_kept = tensor.name in rule.kept
        if is_kept and rule.encodings.get(tensor.name) == "cast":
            yield finding("shapes.kept-cast", tensor.name, expected="the source's dtype", found=f"cast to {tensor.dtype}")
        want = rule.planned.get(tensor.name)
        if want is not None and tensor.dtype != want:
            yield finding("shapes.dtype", tensor.name, expected=f"{want} (planned)", found=tensor.dtype)
        elif tensor.dtype == "F32" and tensor.name in rule.free:
            continue  # as other writers leave it
        elif tensor.dtype not in FLOATS or is_kept:
            if is_kept and want is None and tensor.dtype not in {"F32", rule.asked or rule.common}:
                yield finding("shapes.dtype", tensor.name, expected="F32 (kept)", found=tensor.dtype)
        elif rule.asked and tensor.dtype != rule.asked:
            yield finding("shapes.dtype", tensor.name, expected=f"{rule.asked} (requested)", found=tensor.dtype)
        elif not rule.asked and tensor.dtype != rule.common:
            code = "shapes.mixed-dtypes" if want is None else "shapes.mixed-source"
            yield finding(code, tensor.name, expected=f"{rule.common}, as most elements", found=tensor.dtype)


CHECK = Check("shapes", ("family",), examine)
