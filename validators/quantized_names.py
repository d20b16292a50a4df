"""What a quantized release should hold: the expectation of the model, with the parts of each quantized weight in the weight's place.

A weight counts as quantized when a part of it is stored, so a lost part is missed by name, and a weight that is whole is expected whole.
Of parts whose format is not judged, the names and shapes are taken as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from validators.expectation import Expectation, ExpertGroup
from validators.layouts import LAYOUTS, NAMED_PARTS
from validators.policy import UNQUANTIZED
from validators.quantization import Quantization, QuantizedWeight, read_quantization
from validators.release import Release

Shapes = dict[str, tuple[int, ...]]


def expect_stored(expected: Expectation, release: Release) -> Expectation:
    """Return what a release should hold if it is as the model's expectation and its own quantization say.

    Args:
        expected: of the model, not quantized.
        release: headers and config.

    Returns:
        The expectation, with parts for weights; `expected` itself for a release that declares no quantization.
    """
    quantization = read_quantization(release)
    if not quantization.method:
        return expected
    shapes: Shapes = {}
    mains: dict[str, str] = {}
    for name, shape in expected.shapes.items():
        weight = quantization.weights.get(name)
        if weight is None:
            shapes[name] = shape
            continue
        parts = _parts(weight, shape, quantization)
        shapes |= parts
        mains[name] = weight.main.name if weight.main is not None else next(iter(parts))
    shapes |= _around(quantization, expected.shapes, shapes)
    if quantization.unjudged:
        shapes = _as_stored(release, expected.shapes, shapes)
    return replace(
        expected,
        shapes=shapes,
        tied=tuple((mains.get(kept, kept), mains.get(alias, alias)) for kept, alias in expected.tied),
        experts=tuple(_group(group, mains) for group in expected.experts),
        embedding=mains.get(expected.embedding, expected.embedding),
        head=mains.get(expected.head, expected.head),
        quantized={name: expected.shapes[name] for name in mains},
    )


def _parts(weight: QuantizedWeight, shape: tuple[int, ...], quantization: Quantization) -> Shapes:
    scheme = weight.scheme
    stored = {f"{weight.module}.{suffix}": tensor.shape for suffix, tensor in weight.parts.items()}
    if scheme is None or not scheme.layout or len(shape) != 2:
        named = {f"{weight.module}.{suffix}": () for suffix in NAMED_PARTS.get(quantization.method, ())}
        return {**named, **stored}
    shapes: Shapes = {}
    for row in LAYOUTS[scheme.layout]:
        name, usual = f"{weight.module}.{row.suffix}", row.shapes(scheme, shape)
        if name in stored or row.is_required(scheme):
            found = stored.get(name, ())
            shapes[name] = found if found in usual or not usual else usual[0]
    return shapes


def _around(quantization: Quantization, model: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    # Scales of activations and of the cache, under modules the model has.
    modules = {name[:at] for name in model for at, letter in enumerate(name) if letter == "."}
    of_weights = {tensor.name for weight in quantization.weights.values() for tensor in weight.parts.values()}
    beside = quantization.encoded - of_weights - shapes.keys()
    return {name: () for name in sorted(beside) if name.rpartition(".")[0] in modules}


def _as_stored(release: Release, model: Mapping[str, tuple[int, ...]], shapes: Shapes) -> Shapes:
    # A format that is not judged: whatever lies under a module whose weight is expected stands for that weight.
    weights = {name.removesuffix("weight"): name for name in model if name.endswith(".weight")}
    found, stored = dict(shapes), release.by_name()
    for tensor in release.stored():
        weight = next((weights[prefix] for prefix in _prefixes(tensor.name) if prefix in weights), None)
        if weight is not None and tensor.name not in model:
            found.setdefault(tensor.name, tensor.shape)
            if weight not in stored:
                found.pop(weight, None)
        elif tensor.name in model and tensor.dtype not in UNQUANTIZED:
            found[tensor.name] = tensor.shape
    return found


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:n]) + "." for n in range(len(parts) - 1, 0, -1))


def _group(group: ExpertGroup, mains: Mapping[str, str]) -> ExpertGroup:
    experts = tuple(tuple(mains.get(name, name) for name in names) for names in group.experts)
    return replace(group, router=mains.get(group.router, group.router), experts=experts)
