"""What the gguf package is used for: names in GGUF, and the header of a file: metadata, tokenizer, and where each tensor lies.

The package is asked for only when a GGUF file is planned or measured, and imported in the functions.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reports.errors import RequestError, name_some
from reports.model import Omission
from tasks.engine.planning.choose import Choice
from tasks.engine.planning.gguf import GgufHeader, GgufNames, gguf_type, plan_gguf
from tasks.engine.planning.plan import ExportPlan, TensorPlan
from tasks.gguf_tokenizer import BPE, NONE, Vocabulary, read_vocabulary
from tasks.handover import ModelRequest
from validators.gguf_file import ALIGNMENT, FINEST_FIRST
from validators.gguf_model import Forward, forward_of
from validators.gguf_names import ROPE_FACTORS

if TYPE_CHECKING:
    from gguf import GGUFWriter, SpecialVocab

HEADER_NAME = "gguf_header.bin"
FILE_NAME = "model-{kind}.gguf"
# GGUF's architecture of a family, and the published tensors whose rows it keeps as rotary pairs.
# Source: llama.cpp convert_hf_to_gguf.py, LlamaModel.permute.
_ARCHITECTURES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ("self_attn.q_proj", "self_attn.k_proj")),
    "mistral": ("llama", ("self_attn.q_proj", "self_attn.k_proj")),
    "qwen2": ("qwen2", ()),
    "qwen3": ("qwen3", ()),
}
# A file of exactly this name is taken for another architecture by transformers 5.24, which then finds no tensor names for it.
_MISREAD_NAMES: Mapping[str, str] = {"mistral": "Mistral"}


@dataclass(frozen=True, slots=True)
class GgufPlanned:
    """The plan of a GGUF file, its header in the run folder, and what of the model is not in it."""

    plan: ExportPlan
    header: Path
    omissions: tuple[Omission, ...]


def refuse_absent(where: str) -> None:
    """Raise where the gguf package is not installed.

    Args:
        where: what needs it, for the message.

    Raises:
        RequestError: it is not; the remedy is the command that installs it.
    """
    if find_spec("gguf") is None:
        raise RequestError(
            "needs the package gguf, which is not installed",
            where=where,
            remedy="Install it: pip install 'gguf>=0.19.0' (or shardwright's extra: pip install -e '.[gguf]').",
        )


def plan_file(whole: ExportPlan, request: ModelRequest, choice: Choice, config: Mapping[str, object], folder: Path) -> GgufPlanned:
    """Plan a model's GGUF file and write its header into the run folder.

    Args:
        whole: the model under its published names, nothing cast.
        request: how matrices are stored, the folder of the tokenizer, and what the model is called in the file.
        choice: the family and its sizes.
        config: config.json.
        folder: the run folder.

    Returns:
        The plan.

    Raises:
        RequestError: the family is not written as GGUF, the config asks for something that GGUF readers do not compute, a tensor has no
            name, or the package is absent.
    """
    refuse_absent("--gguf")
    import gguf

    arch, paired = _architecture(choice)
    assert choice.family is not None
    assert choice.dims is not None
    forward = forward_of(config)
    kind, assets = request.gguf, request.assets
    vocabulary = read_vocabulary(assets, choice.dims.size("vocab"))
    special = None if vocabulary.because or assets is None else _read_special(vocabulary, assets)
    if isinstance(special, str):
        vocabulary, special = Vocabulary(because=special), None
    path = folder / HEADER_NAME
    names = _names(whole, arch, choice.dims.num_layers, paired, choice.dims.size("head_dim"))

    def make_header(targets: tuple[TensorPlan, ...]) -> GgufHeader:
        writer = _start(arch, request.title, forward)
        writer.add_file_type(_file_type(targets))
        _add_tokenizer(writer, vocabulary, special)
        factors = np.array(forward.rope_factors, np.float32)
        if factors.size:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes, gguf.GGMLQuantizationType.F32)
        for target in targets:
            _add_tensor(writer, target)
        return _write_header(writer, path, factors.tobytes())

    plan = plan_gguf(whole, kind, names, FILE_NAME.format(kind=kind), make_header)
    left_out = (Omission("tokenizer in the GGUF file", vocabulary.because, "format"),) if vocabulary.because else ()
    return GgufPlanned(plan, path, left_out)


def _architecture(choice: Choice) -> tuple[str, tuple[str, ...]]:
    name = choice.family.name if choice.family else choice.expected.family if choice.expected else "none"
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise RequestError(f"family {name} is not written as GGUF", where="--gguf", remedy=f"There are {known}; export without --gguf.")
    return _ARCHITECTURES[name]


def _names(whole: ExportPlan, arch: str, num_layers: int, paired: tuple[str, ...], head_dim: int) -> GgufNames:
    import gguf

    known = {name: member for member, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known[arch], num_layers)
    published = [tensor.name for _, tensor in whole.tensors()]
    names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in published}
    absent = [name for name, found in names.items() if found is None]
    if absent:
        raise RequestError(f"GGUF's {arch} has no name for {name_some(absent)}", where="--gguf", remedy="Export without --gguf.")
    rotated = frozenset(name for name in published if name.rpartition(".")[0].endswith(paired)) if paired else frozenset()
    return GgufNames({name: found for name, found in names.items() if found is not None}, rotated, head_dim)


def _start(arch: str, name: str, forward: Forward) -> "GGUFWriter":
    import gguf

    writer = gguf.GGUFWriter(None, arch)
    writer.add_type("model")
    writer.add_name(_MISREAD_NAMES.get(name, name))
    writer.add_context_length(forward.positions)
    writer.add_embedding_length(forward.hidden)
    writer.add_block_count(forward.layers)
    writer.add_feed_forward_length(forward.intermediate)
    writer.add_head_count(forward.heads)
    writer.add_head_count_kv(forward.kv_heads)
    writer.add_key_length(forward.head_dim)
    writer.add_value_length(forward.head_dim)
    writer.add_rope_dimension_count(forward.head_dim)
    writer.add_rope_freq_base(forward.rope_theta)
    writer.add_layer_norm_rms_eps(forward.eps)
    writer.add_vocab_size(forward.vocab)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _file_type(targets: Sequence[TensorPlan]) -> int:
    # The coarsest type of a matrix, as llama.cpp's converter says what was asked for, however few rows it fits.
    import gguf

    kinds = {kind for kind, shape in map(gguf_type, targets) if len(shape) > 1}
    return int(gguf.LlamaFileType[f"MOSTLY_{max(kinds, key=FINEST_FIRST.index)}"])


def _read_special(vocabulary: Vocabulary, assets: Path) -> "SpecialVocab | str":
    # Merges, special ids and chat template; or why GGUF cannot say what the tokenizer puts around a text.
    import gguf

    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
    special = gguf.SpecialVocab(assets, load_merges=True, n_vocab=len(vocabulary.tokens))
    for role, ids in (("bos", vocabulary.before), ("eos", vocabulary.after)):
        known = special.special_token_ids.get(role)
        if ids not in ((), (known,)):
            return f"it puts the ids {list(ids)} around a text, GGUF can say {role} alone, which is {known}"
        special.add_special_token[role] = bool(ids)  # said either way: engines have defaults by the name of the cut
    return special


def _add_tokenizer(writer: "GGUFWriter", vocabulary: Vocabulary, special: "SpecialVocab | None") -> None:
    writer.add_tokenizer_model(BPE if special else NONE)
    if special is None:
        return
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    special.add_to_gguf(writer, quiet=True)


def _add_tensor(writer: "GGUFWriter", target: TensorPlan) -> None:
    import gguf

    kind, shape = gguf_type(target)
    writer.add_tensor_info(target.name, shape, np.dtype(np.float32), target.spec.nbytes, gguf.GGMLQuantizationType[kind])


def _write_header(writer: "GGUFWriter", path: Path, first: bytes) -> GgufHeader:
    # What is computed from the config is no source's: it is the first tensor, and its bytes are written with the header.
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    made = path.read_bytes()
    made += bytes(-len(made) % ALIGNMENT) + first
    made += bytes(-len(made) % ALIGNMENT)
    path.write_bytes(made)
    return GgufHeader(len(made), hashlib.sha256(made).hexdigest())
