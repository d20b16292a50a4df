"""Where parameters lie in the flat vectors of Megatron's distributed optimizer. They keep no names.

A vector has a stage's trainable parameters of one dtype in the reverse of the model's order. It is cut into buckets: parameters begin at
multiples of 64 elements of their bucket, and a bucket ends where its last parameter does. What follows may be padding to a multiple of the
data-parallel ranks, which no checkpoint keeps. A tied embedding, and its copy on the last stage, have a bucket of their own.

How many other buckets there are depends on arguments whose defaults changed from version to version, so it is not computed. It needs not
be: a bucket that ends between multiples of 64 makes the vector shorter than one bucket would be, and one that ends at a multiple changes
no start. So a vector of exactly the length of one bucket has the starts of one bucket; others are not told apart.

Source: Megatron-LM core 0.7 to main, megatron/core/distributed/param_and_grad_buffer.py.
"""

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

ALIGNMENT = 64  # elements
_SHARED = ("word_embeddings.weight", "output_layer.weight")
K = TypeVar("K", bound=Hashable)


def own_buckets(name: str, args: Mapping[str, object]) -> bool:
    """Return whether a parameter has a bucket of its own: one of two stages whose tied weights are trained as one.

    Args:
        name: the parameter.
        args: the run's arguments.

    Returns:
        Whether it does.
    """
    stages = args.get("pipeline_model_parallel_size", 1)
    is_tied = args.get("untie_embeddings_and_output_weights") is False
    return name.endswith(_SHARED) and is_tied and isinstance(stages, int) and stages > 1


def starts_in(numels: Mapping[K, int], shared: Collection[K], length: int) -> dict[K, int] | None:
    """Return where each parameter begins in a vector.

    Args:
        numels: elements of each parameter, in the vector's order.
        shared: those that may have buckets of their own.
        length: of the vector, padding left out.

    Returns:
        Parameter → first element; None where no layout known here has this length.
    """
    for apart in ((), shared):
        starts, end = _walk(numels, apart)
        if end == length:
            return starts
    return None


def _walk(numels: Mapping[K, int], apart: Collection[K]) -> tuple[dict[K, int], int]:
    at = bucket = 0
    starts = {}
    for key, numel in numels.items():
        at = bucket - (bucket - at) // ALIGNMENT * ALIGNMENT  # up to a multiple, counted from the bucket's beginning
        bucket = at if key in apart else bucket
        starts[key] = at
        at += numel
        bucket = at if key in apart else bucket
    return starts, at
