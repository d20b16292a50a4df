"""Folder → model → logits, through transformers; and what transformers says a config's model looks like.

transformers is imported inside the functions: it costs seconds. Code from a model's folder is never run, nothing is fetched. A forward is
deterministic: eval mode, eager attention and eager experts, no cache. What does not fit the memory limit runs from disk through accelerate.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Protocol, cast

import torch

from reports.errors import ReleaseError, name_some
from tasks.batches import CHAT, TEXT, Batch, random_batch, row_batch
from tasks.gguf_reading import gguf_arguments
from tasks.quiet import Talk, quiet
from validators.release import open_release

_LOADING = {"local_files_only": True, "trust_remote_code": False}
_Kinds = tuple[type[Exception], ...]
_REFUSALS: _Kinds = (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError, ImportError)
_CASTS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DETERMINISTIC = {"attn_implementation": "eager", "experts_implementation": "eager"}


class ForwardError(ReleaseError, ValueError):
    """transformers cannot load or run this folder, or does not find every parameter in it."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What one batch gave. `logits` (B, S, V) fp32; `hidden` (B, S, H) each, the embeddings' output first; empty unless asked for."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """What a forward may use: memory for weights, and a folder for those that do not fit."""

    memory_limit: int
    offload_folder: Path


class Model(Protocol):
    """A loaded model."""

    def run(self, input_ids: torch.Tensor, *, hidden: bool = False) -> Forward:
        """Run one batch.

        Args:
            input_ids: (B, S) int64.
            hidden: also keep every layer's output.

        Returns:
            Logits, and hidden states if asked for.
        """


def preload() -> None:
    """Import what a forward will need. A command does so while it waits for its Prefect server: it takes seconds."""
    import_module("transformers").AutoModelForCausalLM  # noqa: B018  (transformers imports on the first look)
    import_module("transformers.core_model_loading")


class _Output(Protocol):
    logits: torch.Tensor
    hidden_states: Sequence[torch.Tensor]


class _CausalModel(Protocol):
    # What is used of a transformers model.
    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool, output_hidden_states: bool) -> _Output: ...


class _EmptyModel(Protocol):
    all_tied_weights_keys: dict[str, str]

    def state_dict(self) -> dict[str, torch.Tensor]: ...


class _Config(Protocol):
    vocab_size: int

    def get_text_config(self) -> "_Config": ...


class _Tokenizer(Protocol):
    chat_template: object

    def __call__(self, text: str) -> dict[str, list[int]]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, return_dict: bool) -> dict[str, list[int]]: ...


class _Loaded:
    def __init__(self, model: _CausalModel, folder: Path) -> None:
        self._model, self._folder = model, folder

    def run(self, input_ids: torch.Tensor, *, hidden: bool = False) -> Forward:
        with torch.inference_mode(), _deterministic(), _as_forward_error(self._folder, "torch cannot run it", (RuntimeError,)):
            out = self._model(input_ids=input_ids, use_cache=False, output_hidden_states=hidden)
        return Forward(out.logits.float(), tuple(out.hidden_states) if hidden else ())


@dataclass(frozen=True, slots=True)
class Architecture:
    """What transformers says a config's model is made of.

    `shapes` are the published names, in the model's order; `tied` lists (kept, alias); `renamed` the live names that a published
    checkpoint does not have, because transformers renames or fuses them while loading.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: tuple[tuple[str, str], ...]
    renamed: tuple[str, ...]


@contextmanager
def open_model(folder: Path, room: Room, *, dtype: torch.dtype = torch.float32) -> Iterator[Model]:
    """Load a folder's model; it is gone when the context ends.

    Args:
        folder: a release.
        room: what it may use.
        dtype: the weights are cast to it, and the forward runs in it.

    Yields:
        The model.

    Raises:
        ForwardError: transformers does not know the architecture, refuses the weights, or leaves parameters unfilled.
    """
    with _quiet():
        from transformers import AutoModelForCausalLM

        offload: dict[str, object] = {}
        if nbytes_of(folder, dtype) > room.memory_limit:
            room.offload_folder.mkdir(parents=True, exist_ok=True)
            offload = {"device_map": "auto", "max_memory": {"cpu": room.memory_limit}, "offload_folder": str(room.offload_folder)}
        with _as_forward_error(folder):
            gguf = gguf_arguments(folder, _LOADING)
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **gguf, **_LOADING, **_DETERMINISTIC, **offload
            )
        unfilled = sorted({*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])})
        if unfilled:
            raise ForwardError(f"transformers finds no values for {name_some(unfilled)}", where=str(folder))
        _unify(model, dtype)
        yield _Loaded(model.eval(), folder)


def _unify(model: torch.nn.Module, dtype: torch.dtype) -> None:
    # transformers 5.24 dequantizes packed experts in the dtype of their scales, whatever was asked for, and everything else in `dtype`.
    for parameter in model.parameters():
        if parameter.dtype in _CASTS and parameter.dtype != dtype and not parameter.is_meta:
            parameter.data = parameter.data.to(dtype)


def logits_of(
    folder: Path,
    input_ids: torch.Tensor,
    *,
    memory_limit: int,
    offload_folder: Path,
    dtype: torch.dtype = torch.float32,
    hidden: bool = False,
) -> Forward:
    """Run one batch through a folder's model.

    Args:
        folder: a release.
        input_ids: (B, S) int64.
        memory_limit: bytes of weights held in memory; more run from disk.
        offload_folder: where what does not fit may be written.
        dtype: the weights are cast to it, and the forward runs in it.
        hidden: also keep every layer's output.

    Returns:
        Logits, and hidden states if asked for.

    Raises:
        ForwardError: see `open_model`.
    """
    with open_model(folder, Room(memory_limit, offload_folder), dtype=dtype) as model:
        return model.run(input_ids, hidden=hidden)


def first_diverging_layer(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor], *, tolerance: float = 0.0) -> str:
    """Name the first layer whose output is not the same.

    Args:
        reference: hidden states of one forward, the embeddings' first.
        candidate: those of the other.
        tolerance: how far values may be apart, relative to the largest of a state; 0 for bit for bit.

    Returns:
        "embeddings", "layer 3", or "head" when all hidden states agree.
    """
    for index, (first, second) in enumerate(zip(reference, candidate, strict=True)):
        if not torch.equal(first, second) and not _is_near(first, second, tolerance):
            return "embeddings" if index == 0 else f"layer {index - 1}"
    return "head"


def _is_near(first: torch.Tensor, second: torch.Tensor, tolerance: float) -> bool:
    return float((first - second).abs().max()) <= tolerance * float(first.abs().max())


def default_batches(config_folder: Path, *, tokenizer_folder: Path | None = None) -> tuple[Batch, ...]:
    """Return what a release is run on: random ids, and text and chat rows where a tokenizer is given.

    Args:
        config_folder: holds config.json.
        tokenizer_folder: holds a sound tokenizer; None for none.

    Returns:
        Batches whose ids the model takes.

    Raises:
        ForwardError: transformers does not know the architecture, or a token has no embedding row.
    """
    vocab, max_position = limits_of(config_folder)
    rows = _encode(tokenizer_folder) if tokenizer_folder else {}
    texts = [row_batch(name, ids, max_position) for name, ids in rows.items()]
    beyond = [batch.name for batch in texts if batch is not None and int(batch.input_ids.max()) >= vocab]
    if beyond:
        raise ForwardError(f"the tokenizer gives ids beyond the {vocab} rows of the embedding", where=name_some(beyond))
    return (random_batch(reachable_ids(config_folder, tokenizer_folder), max_position), *(batch for batch in texts if batch is not None))


def limits_of(config_folder: Path) -> tuple[int, int]:
    """Return how many ids a config's model has, and how many positions it takes.

    Args:
        config_folder: holds config.json.

    Returns:
        vocab_size and max_position_embeddings; a model without a limit on positions takes any number.

    Raises:
        ForwardError: transformers does not know the architecture.
    """
    config = _config(config_folder).get_text_config()
    return int(config.vocab_size), int(getattr(config, "max_position_embeddings", None) or 1 << 30)


def reachable_ids(config_folder: Path, tokenizer_folder: Path | None) -> int:
    """Return how many ids a tokenizer can give; without one, all of the vocabulary.

    Args:
        config_folder: holds config.json.
        tokenizer_folder: holds the tokenizer, or None.

    Returns:
        Ids are 0 … n-1; never more than the config's vocabulary.

    Raises:
        ForwardError: transformers does not know the architecture.
    """
    vocab, _ = limits_of(config_folder)
    return vocab if tokenizer_folder is None else min(vocab, 1 + max(_tokenizer(tokenizer_folder).get_vocab().values()))


def why_not_runnable(config_folder: Path) -> str:
    """Say why transformers cannot run a config's model, before any weight is looked at.

    Args:
        config_folder: holds config.json.

    Returns:
        The reason; empty when it can.
    """
    try:
        _build_empty(config_folder)
    except ForwardError as error:
        return error.what
    return ""


def defaults_of(model_type: str) -> Mapping[str, object]:
    """Return what transformers takes the absent fields of a config for.

    Args:
        model_type: as config.json has it.

    Returns:
        Field to value; empty for a model that transformers does not know.
    """
    with _quiet():
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}


def describe_architecture(config_folder: Path) -> Architecture:
    """Return what transformers would build from a config, without memory for its weights.

    Args:
        config_folder: holds config.json.

    Returns:
        Names, shapes, ties, and what is called otherwise in memory.

    Raises:
        ForwardError: transformers does not know the architecture.
    """
    model = _build_empty(config_folder)
    live = model.state_dict()
    with _quiet(), _as_forward_error(config_folder):
        from transformers.core_model_loading import revert_weight_conversion

        published = revert_weight_conversion(model, dict(live))
    names = [name for name in live if name in published] + [name for name in published if name not in live]
    return Architecture(
        {name: tuple(published[name].shape) for name in names},
        tuple((kept, alias) for alias, kept in sorted(model.all_tied_weights_keys.items())),
        tuple(name for name in live if name not in published or published[name].shape != live[name].shape),
    )


def _build_empty(config_folder: Path) -> _EmptyModel:
    config = _config(config_folder)
    with _quiet(), torch.device("meta"), _as_forward_error(config_folder):
        from transformers import AutoModelForCausalLM

        return cast("_EmptyModel", AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def _config(folder: Path) -> _Config:
    with _quiet(), _as_forward_error(folder):
        from transformers import AutoConfig

        return cast("_Config", AutoConfig.from_pretrained(folder, **_LOADING))


def _tokenizer(folder: Path) -> _Tokenizer:
    with _quiet(), _as_forward_error(folder):
        from transformers import AutoTokenizer

        return cast("_Tokenizer", AutoTokenizer.from_pretrained(folder, **_LOADING))


def _encode(folder: Path) -> dict[str, list[int]]:
    tokenizer = _tokenizer(folder)
    rows = {"text": tokenizer(TEXT)["input_ids"]}
    if tokenizer.chat_template:
        rows["chat"] = tokenizer.apply_chat_template(list(CHAT), tokenize=True, return_dict=True)["input_ids"]
    return rows


def nbytes_of(folder: Path, dtype: torch.dtype) -> int:
    """Return what the weights of a folder take in memory.

    Args:
        folder: a release.
        dtype: they are cast to it.

    Returns:
        Bytes.
    """
    release = open_release(folder)
    stored = release.ggufs[0].tensors if release.is_gguf else release.stored()
    return sum(prod(tensor.shape) for tensor in stored) * dtype.itemsize


@contextmanager
def _as_forward_error(folder: Path, words: str = "transformers refuses it", kinds: _Kinds = _REFUSALS) -> Iterator[None]:
    # What transformers raises for folders it does not like, and torch for weights that do not fit each other; anything else is a bug.
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (*kinds, SafetensorError, StrictDataclassError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ForwardError(f"{words}: {reason}", where=str(folder)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as talk

    with quiet(cast("Talk", talk)):
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
