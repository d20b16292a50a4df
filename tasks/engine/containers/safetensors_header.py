"""Writing the header of a safetensors file. Source: safetensors 0.8 README, format section."""

import json
import struct
from collections.abc import Sequence

from validators.expectation import ITEMSIZE, TensorSpec

ALIGNMENT = 8  # the data section starts on a multiple of this; the library pads the header with spaces


def storage_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return tensors in the order they are stored: wide dtypes first, so that each starts on a multiple of its item size.

    Args:
        specs: any order.

    Returns:
        The same tensors; those of one width keep their order.
    """
    return sorted(specs, key=lambda spec: -ITEMSIZE[spec.dtype])


def format_header(specs: Sequence[TensorSpec]) -> bytes:
    """Return the header of a file that stores `specs` back to back, in this order.

    Args:
        specs: the tensors.

    Returns:
        Length prefix, JSON and padding; its length is a multiple of ALIGNMENT.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        entries[spec.fqn] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
