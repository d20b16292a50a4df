"""Last planning step: which file each target goes to, and where in it.

Files are filled and named by huggingface-hub's own sharding function, so that a release looks as if `save_pretrained` had written it.
"""

from collections.abc import Sequence
from dataclasses import replace

from huggingface_hub import split_state_dict_into_shards_factory

from tasks.engine.containers.safetensors_header import ALIGNMENT, format_header, storage_order
from tasks.engine.planning.plan import FilePlan, TensorPlan

FILENAME_PATTERN = "model{suffix}.safetensors"


def pack(tensors: Sequence[TensorPlan], max_file_bytes: int) -> tuple[FilePlan, ...]:
    """Place targets in files.

    Args:
        tensors: targets in the model's order.
        max_file_bytes: tensor bytes a file may hold; a larger tensor gets a file of its own.

    Returns:
        Files in the order of their names; all parts of a weight are in one. In a file, quantized weights come first, each with its values
        before its scales, so that they are read once; then the rest, wide dtypes first.
    """
    weights: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        weights.setdefault(tensor.part.weight if tensor.part else tensor.name, []).append(tensor)
    split = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda parts: sum(part.spec.nbytes for part in parts),
        filename_pattern=FILENAME_PATTERN,
        max_shard_size=max_file_bytes,
    )
    return tuple(_place(name, [weights[weight] for weight in names]) for name, names in sorted(split.filename_to_tensors.items()))


def _place(name: str, weights: Sequence[Sequence[TensorPlan]]) -> FilePlan:
    by_name = {tensor.name: tensor for parts in weights for tensor in parts}
    together = [part.spec for parts in weights if _fill_whole_units(parts) for part in parts]
    specs = together + storage_order([part.spec for parts in weights if not _fill_whole_units(parts) for part in parts])
    at = header_nbytes = len(format_header(specs))
    placed = []
    for spec in specs:
        placed.append(replace(by_name[spec.fqn], span=(at, at + spec.nbytes)))
        at += spec.nbytes
    return FilePlan(name, header_nbytes, at, tuple(placed))


def _fill_whole_units(parts: Sequence[TensorPlan]) -> bool:
    # Parts that can stand in any order without ever starting a tensor off its alignment.
    return all(part.part is not None and part.spec.nbytes % ALIGNMENT == 0 for part in parts)
