"""A GGUF file holds what its config implies: architecture, constants, names, shapes, types, places, and the tokenizer beside it.

Judged from the header, without a tensor byte. A model type without a row in validators.gguf_names, and types of values without a row in
validators.gguf_file, are said not to be judged. Constants are compared in fp32, as the file stores them.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reports.codes import finding
from reports.errors import RequestError, name_some
from reports.model import Finding, Measure
from validators.check import Check, Outcome, attempt
from validators.expectation import Evidence
from validators.gguf_file import GgufFile, GgufTensor, coarsest_type, main_type
from validators.gguf_model import Forward, forward_of
from validators.gguf_names import ARCHITECTURES, HEAD, ROPE_FACTORS, gguf_name
from validators.gguf_vocabulary import judge_vocabulary

# GGUF's keys behind the architecture's name, and the field of Forward they state; those engines do without when absent are optional.
_KEYS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "context_length": ("positions", True),
        "embedding_length": ("hidden", True),
        "block_count": ("layers", True),
        "feed_forward_length": ("intermediate", True),
        "attention.head_count": ("heads", True),
        "attention.head_count_kv": ("kv_heads", True),
        "attention.key_length": ("head_dim", False),
        "attention.value_length": ("head_dim", False),
        "rope.dimension_count": ("head_dim", False),
        "rope.freq_base": ("rope_theta", True),
        "attention.layer_norm_rms_epsilon": ("eps", True),
        "vocab_size": ("vocab", False),
    }
)
# Keys that engines obey and no config here asks for, and values that change nothing. Source: llama.cpp src/llama-model.cpp, load_hparams.
_NEUTRAL: Mapping[str, tuple[float | str, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "rope.scale_linear": (0, 1),
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (0, 1),
        "rope.scaling.attn_factor": (1,),
    }
)
_WITHOUT: Mapping[str, float] = MappingProxyType({"rope_theta": 10_000.0})  # what engines take for an absent key
# general.file_type of files whose matrices are stored so. Source: llama.cpp include/llama.h, enum llama_ftype.
_FILE_TYPES: Mapping[str, int] = MappingProxyType({"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32})


@dataclass(frozen=True, slots=True)
class _Judged:
    # What one file is judged by.
    file: GgufFile
    evidence: Evidence

    def where(self, what: str) -> str:
        return f"{self.file.name}: {what}"


def examine(evidence: Evidence) -> Outcome:
    """Judge the header of every GGUF file.

    Args:
        evidence: headers; config and expectation where there are any.

    Returns:
        Findings, and the number of tensors and keys looked at.
    """
    files = evidence.release.ggufs
    findings = [found for file in files for found in _judge(_Judged(file, evidence))]
    types = Counter(tensor.type for file in files for tensor in file.tensors)
    measured: dict[str, Measure] = {
        "files": len(files),
        "tensors": types.total(),
        "types": ", ".join(f"{kind} x{n}" for kind, n in sorted(types.items())),
    }
    return Outcome(tuple(findings), sum(len(file.tensors) + len(file.metadata) for file in files), measured)


def _judge(judged: _Judged) -> Iterator[Finding]:
    yield from _judge_layout(judged)
    yield from _judge_types(judged)
    part = _part_of_a_model(judged.file)
    if part:
        yield finding("gguf.not-judged", judged.file.name, expected="a whole model in one file", found=part)
        return
    yield from judge_vocabulary(judged.file, judged.evidence.release)
    config = judged.evidence.release.config
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is None:
        found = f"model type {config.get('model_type')}" if config else "no config.json beside it"
        yield finding("gguf.not-judged", judged.file.name, expected=f"a config of {', '.join(ARCHITECTURES)}", found=found)
        return
    said = judged.file.metadata.get("general.architecture")
    if said not in {row.name for row in ARCHITECTURES.values()}:
        yield finding("gguf.not-judged", judged.file.name, expected=architecture.name, found=f"architecture {said}")
        return
    if said != architecture.name:
        where = judged.where("general.architecture")
        yield finding("gguf.architecture", where, expected=architecture.name, found=str(said))
        return
    yield from _judge_metadata(judged, architecture.name)
    yield from _judge_names(judged)


def _part_of_a_model(file: GgufFile) -> str:
    # What a file is that holds no whole model; "" for one that does.
    kind, parts = file.metadata.get("general.type", "model"), file.metadata.get("split.count", 1)
    return f"general.type {kind}" if kind != "model" else f"one of {parts} parts" if parts not in (0, 1) else ""


def _judge_metadata(judged: _Judged, architecture: str) -> Iterator[Finding]:
    try:
        forward = forward_of(judged.evidence.release.config)
    except RequestError as error:
        yield finding("gguf.not-judged", judged.file.name, expected="a config whose metadata is known here", found=error.what)
        return
    for key, (field, is_needed) in _KEYS.items():
        name = f"{architecture}.{key}"
        said, wanted = judged.file.metadata.get(name), getattr(forward, field)
        if said is None:
            if (is_needed and wanted != _WITHOUT.get(field)) or (field == "head_dim" and wanted != forward.hidden // forward.heads):
                yield finding("gguf.metadata-missing", judged.where(name), expected=str(wanted), found="absent")
        elif isinstance(said, (tuple, str)) or _as_stored(said) != _as_stored(wanted):
            yield finding("gguf.metadata", judged.where(name), expected=str(wanted), found=str(said)[:80])
    for key, neutral in _NEUTRAL.items():
        name = f"{architecture}.{key}"
        said = judged.file.metadata.get(name)
        if said is not None and said not in neutral:
            expected = f"absent, or {' or '.join(map(str, neutral))}: the config asks for nothing else"
            yield finding("gguf.metadata", judged.where(name), expected=expected, found=str(said)[:80])


def _as_stored(number: float) -> float:
    return number if isinstance(number, int) else float(struct.unpack("<f", struct.pack("<f", number))[0])


def _judge_names(judged: _Judged) -> Iterator[Finding]:
    expected = judged.evidence.expected
    if expected is None:
        return
    alias = {name for _, name in expected.tied} if expected.is_tied else set()
    shapes = {gguf_name(name): shape for name, shape in expected.shapes.items() if name not in alias}
    forward = attempt(lambda: forward_of(judged.evidence.release.config))
    is_known = isinstance(forward, Forward)
    if isinstance(forward, Forward) and forward.rope_factors:
        shapes[ROPE_FACTORS] = (len(forward.rope_factors),)
    allowed = {HEAD} if expected.is_tied else set()
    allowed |= set() if is_known else {ROPE_FACTORS}  # of a config that is said not to be judged
    held: dict[str, GgufTensor] = {}
    for tensor in judged.file.tensors:
        if tensor.name in held:
            yield finding("gguf.twice", judged.where(tensor.name), expected="once", found="more than once")
        held[tensor.name] = tensor
        if tensor.name not in shapes and tensor.name not in allowed:
            yield finding("gguf.unexpected", judged.where(tensor.name), expected="no such tensor", found=f"{tensor.type} {tensor.shape}")
    for name, shape in shapes.items():
        if name not in held:
            code = "gguf.head-missing" if name == HEAD else "gguf.missing"
            yield finding(code, judged.where(name), expected=f"shape {shape}", found="absent")
        elif held[name].shape != shape:
            yield finding("gguf.shape", judged.where(name), expected=f"{shape}", found=f"{held[name].shape}")


def _judge_layout(judged: _Judged) -> Iterator[Finding]:
    file, at = judged.file, judged.file.data_start
    known = sorted((tensor for tensor in file.tensors if tensor.nbytes >= 0), key=lambda tensor: tensor.start)
    is_whole = len(known) == len(file.tensors)
    for tensor in known:
        if tensor.start % file.alignment or tensor.start < at or tensor.start + tensor.nbytes > file.nbytes:
            found = f"bytes {tensor.start} to {tensor.start + tensor.nbytes} of {file.nbytes}"
            expected = f"from {at} on, in steps of {file.alignment}, within the file"
            yield finding("gguf.layout", judged.where(tensor.name), expected=expected, found=found)
        at = max(at, tensor.start + tensor.nbytes)
    end = -(-at // file.alignment) * file.alignment
    if is_whole and file.nbytes > end:
        yield finding("gguf.layout", file.name, expected=f"{end} bytes", found=f"{file.nbytes} bytes")


def _judge_types(judged: _Judged) -> Iterator[Finding]:
    file = judged.file
    for tensor in file.tensors:
        if tensor.nbytes >= 0 and len(tensor.shape) < 2 and tensor.type != "F32":
            yield finding("gguf.type", judged.where(tensor.name), expected="F32", found=tensor.type)
    unknown = sorted({tensor.type for tensor in file.tensors if tensor.nbytes < 0})
    if unknown:
        yield finding("gguf.not-judged", file.name, expected=", ".join(_FILE_TYPES), found=f"tensors of {name_some(unknown)}")
        return
    said, main, coarsest = file.metadata.get("general.file_type"), main_type(file), coarsest_type(file)
    if main and said is not None and said not in (_FILE_TYPES[main], _FILE_TYPES[coarsest]):
        wanted = f"{_FILE_TYPES[main]} (most bytes are {main})"
        if coarsest != main:
            wanted += f" or {_FILE_TYPES[coarsest]} (the coarsest are {coarsest})"
        yield finding("gguf.file-type", judged.where("general.file_type"), expected=wanted, found=str(said))


CHECK = Check("gguf", ("gguf",), examine)
