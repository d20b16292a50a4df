"""Last planning step: which file each target goes to, and where in it.

Files are filled and named by huggingface-hub's own sharding function, so that a release looks as if `save_pretrained` had written it.
"""

from collections.abc import Sequence
from dataclasses import replace

from huggingface_hub import split_state_dict_into_shards_factory

from tasks.engine.containers.safetensors_header import format_header, storage_order
from tasks.engine.planning.plan import FilePlan, TensorPlan

FILENAME_PATTERN = "model{suffix}.safetensors"


def pack(tensors: Sequence[TensorPlan], max_file_bytes: int) -> tuple[FilePlan, ...]:
    """Place targets in files.

    Args:
        tensors: targets in the model's order.
        max_file_bytes: tensor bytes a file may hold; a larger tensor gets a file of its own.

    Returns:
        Files in the order of their names; within one, wide dtypes first.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.spec.nbytes,
        filename_pattern=FILENAME_PATTERN,
        max_shard_size=max_file_bytes,
    )
    return tuple(
        _place(name, [by_name[tensor] for tensor in tensor_names]) for name, tensor_names in sorted(split.filename_to_tensors.items())
    )


def _place(name: str, tensors: Sequence[TensorPlan]) -> FilePlan:
    by_name = {tensor.name: tensor for tensor in tensors}
    specs = storage_order([tensor.spec for tensor in tensors])
    at = header_nbytes = len(format_header(specs))
    placed = []
    for spec in specs:
        placed.append(replace(by_name[spec.fqn], span=(at, at + spec.nbytes)))
        at += spec.nbytes
    return FilePlan(name, header_nbytes, at, tuple(placed))
