"""Planning a GGUF file: an ordinary plan's targets under GGUF's names and types, in one file.

Vectors stay F32, as llama.cpp wants them. A matrix whose rows are no whole blocks of the type is stored as F16, and the plan says so.
Where the architecture keeps rotary pairs side by side, rows of queries and keys go back from halves to pairs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from reports.errors import RequestError
from tasks.engine.encodings.cast import TORCH
from tasks.engine.encodings.q8_0 import BLOCK, BLOCK_NBYTES
from tasks.engine.planning.plan import ExportPlan, FilePlan, Part, Quantized, QuantizedGroup, TensorPlan, Whole, digest_plan
from tasks.engine.tensors.ops import OpCall
from validators.gguf_file import ALIGNMENT

Q8_0 = "q8_0"
_VECTORS, _MISFITS = "F32", "F16"
# What is done to rows of rotary halves, or to what becomes them: the name of the op that makes pairs of it.
TO_PAIRS: Mapping[str, OpCall] = {"same": OpCall("rope_to_pairs"), "rope_to_halves": OpCall()}


@dataclass(frozen=True, slots=True)
class GgufNames:
    """GGUF's names by published name, and the published tensors whose rows are stored as rotary pairs of `head_dim`."""

    names: Mapping[str, str]
    paired: frozenset[str]
    head_dim: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The bytes before the first tensor: how many, and their sha256."""

    nbytes: int
    sha256: str


def plan_gguf(
    whole: ExportPlan, kind: str, names: GgufNames, name: str, make_header: Callable[[tuple[TensorPlan, ...]], GgufHeader]
) -> ExportPlan:
    """Plan the GGUF file of a model.

    Args:
        whole: the model under its published names, nothing cast.
        kind: "F16", "BF16" or "Q8_0": how matrices are stored.
        names: GGUF's names.
        name: the file's.
        make_header: makes the header of these targets, in this order.

    Returns:
        A plan of one file.

    Raises:
        RequestError: a tensor has no name in GGUF, or is no float.
    """
    targets, kept = [], []
    for _, tensor in whole.tensors():
        target, because = _target(tensor, kind, names)
        targets.append(target)
        if because:
            kept.append(Whole(target.name, because))
    header = make_header(tuple(targets))
    placed = tuple(_place(targets, header.nbytes))
    end = _aligned(placed[-1].span[1] if placed else header.nbytes)
    file = FilePlan(name, header.nbytes, end, placed, header.sha256)
    groups = (QuantizedGroup(Q8_0, ("*",)),) if any(tensor.part for tensor in placed) else ()
    quantized = Quantized(groups, (), tuple(kept)) if kind == "Q8_0" else None
    plan = replace(whole, files=(file,), kept_dtype=(), quantized=quantized, digest="")
    return replace(plan, digest=digest_plan(plan))


def gguf_type(tensor: TensorPlan) -> tuple[str, tuple[int, ...]]:
    """Return how a planned target is stored.

    Args:
        tensor: of a plan by `plan_gguf`.

    Returns:
        GGUF's type and the shape of the values.
    """
    return ("Q8_0", tensor.part.shape) if tensor.part else (tensor.dtype, tensor.shape)


def _target(tensor: TensorPlan, kind: str, names: GgufNames) -> tuple[TensorPlan, str]:
    # The target, and why it is stored finer than asked.
    name = names.names.get(tensor.name)
    if name is None or tensor.dtype not in TORCH:
        what = "has no name in GGUF" if name is None else f"is {tensor.dtype}, no float"
        raise RequestError(what, where=f"--gguf: {tensor.name}", remedy="Leave it out with --drop, or export without --gguf.")
    op = replace(TO_PAIRS[tensor.op.name], head_dim=names.head_dim) if tensor.name in names.paired else tensor.op
    moved = replace(tensor, name=name, op=OpCall() if op.name == "same" else op)
    if len(tensor.shape) < 2:
        return _cast(moved, _VECTORS), ""
    if kind != "Q8_0":
        return _cast(moved, kind), ""
    columns = tensor.shape[-1]
    if columns % BLOCK:
        return _cast(moved, _MISFITS), f"Q8_0 needs columns in multiples of {BLOCK}, this has {columns}: stored as {_MISFITS}"
    part = Part(tensor.name, "weight", tensor.shape, "F32")
    return replace(moved, shape=(*tensor.shape[:-1], columns // BLOCK * BLOCK_NBYTES), dtype="U8", encoding=Q8_0, part=part), ""


def _cast(tensor: TensorPlan, dtype: str) -> TensorPlan:
    return replace(tensor, dtype=dtype, encoding="copy" if tensor.inputs[0].dtype == dtype else "cast")


def _place(targets: list[TensorPlan], at: int) -> Iterator[TensorPlan]:
    for target in targets:
        at = _aligned(at)
        yield replace(target, span=(at, at + target.spec.nbytes))
        at += target.spec.nbytes


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
