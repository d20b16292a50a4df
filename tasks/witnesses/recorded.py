"""Witness *recorded*: logits the trainer saved beside the checkpoint. It proves the mapping, as far as its batch reaches.

File: safetensors with `input_ids` int64 (B, S) and `logits` fp32 (B, S, V); metadata `computed_in` names the dtype of that forward. What
else is in the file is left alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from reports.errors import FormatError, name_some

# How trainers spell the dtype of a forward, and its safetensors code.
_COMPUTED_IN: Mapping[str, str] = {
    "fp32": "F32",
    "float32": "F32",
    "F32": "F32",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "BF16": "BF16",
    "fp16": "F16",
    "float16": "F16",
    "F16": "F16",
}
_REMEDY = "Record it as: input_ids int64 (B, S), logits fp32 (B, S, V), metadata computed_in."


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the trainer recorded. `computed_in` is a safetensors dtype code."""

    input_ids: torch.Tensor
    logits: torch.Tensor
    computed_in: str

    @property
    def vocab(self) -> int:
        """Columns of the logits."""
        return int(self.logits.shape[2])


def read_recorded(path: Path, *, vocab: int, reachable: int, max_position: int) -> Recorded:
    """Read recorded logits and check that they can be this model's.

    Args:
        path: the file.
        vocab: the config's vocabulary.
        reachable: how many of its ids the tokenizer can give; a trainer may have left out the padding behind them.
        max_position: the longest sequence the model takes.

    Returns:
        The recording.

    Raises:
        FormatError: not such a file, or its shapes, ids or values cannot be this model's.
    """
    where = str(path)
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if not {"input_ids", "logits"} <= names:
                raise FormatError(f"holds {name_some(names)}, not input_ids and logits", where=where, remedy=_REMEDY)
            metadata = file.metadata() or {}
            ids, logits = file.get_tensor("input_ids"), file.get_tensor("logits")
    except (SafetensorError, OSError) as error:
        raise FormatError(f"not readable as safetensors: {error}", where=where, remedy=_REMEDY) from None
    if metadata.get("computed_in") not in _COMPUTED_IN:
        raise FormatError(
            f"metadata computed_in is {metadata.get('computed_in')!r}, not one of {', '.join(_COMPUTED_IN)}", where=where, remedy=_REMEDY
        )
    problem = _find_problem(ids, logits, vocab=vocab, reachable=reachable, max_position=max_position)
    if problem:
        raise FormatError(problem, where=where, remedy=_REMEDY)
    return Recorded(ids, logits, _COMPUTED_IN[metadata["computed_in"]])


def _find_problem(ids: torch.Tensor, logits: torch.Tensor, *, vocab: int, reachable: int, max_position: int) -> str:
    if ids.dtype != torch.int64 or ids.ndim != 2 or ids.numel() == 0:
        return f"input_ids are {ids.dtype} {tuple(ids.shape)}"
    if logits.dtype != torch.float32 or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return f"logits are {logits.dtype} {tuple(logits.shape)} for input_ids {tuple(ids.shape)}"
    if not reachable <= logits.shape[2] <= vocab:
        needed = f"{vocab}" if reachable == vocab else f"{reachable} to {vocab}"
        return f"logits have {logits.shape[2]} columns, this model's vocabulary needs {needed}"
    if ids.shape[1] > max_position:
        return f"rows of {ids.shape[1]} tokens, this model takes {max_position}"
    if int(ids.min()) < 0 or int(ids.max()) >= logits.shape[2]:
        return f"ids from {int(ids.min())} to {int(ids.max())}, the vocabulary has {logits.shape[2]}"
    if not bool(torch.isfinite(logits).all()):
        return f"{int((~torch.isfinite(logits)).sum())} logits are not finite"
    return ""
