"""The classes that DeepSpeed's files name, as inert stand-ins; the closed list of the formats `zero` and `universal`.

What a trainer adds as client state is often a Namespace or numpy arrays: nothing looks into those, so they are let pass as opaque. Any
other class of a trainer is refused by name.

Source: deepspeed 0.19.8, runtime/fp16/loss_scaler.py, runtime/zero/config.py, utils/tensor_fragment.py, checkpoint/universal_checkpoint.py.
"""

from collections.abc import Callable
from types import MappingProxyType

from tasks.engine.containers.pickles import Allowed, Opaque, Record
from tasks.engine.containers.torch_pickle import TENSOR_GLOBALS, RebuildV2, RebuildV3, StoredTensor


class FragmentAddress(Record):
    """Stand-in for `fragment_address`: where a parameter's piece lies in a rank's slice."""

    __slots__ = ("numel", "start")
    numel: int
    start: int


class Stage(Opaque):
    """Stand-in for `ZeroStageEnum`: the number."""

    __slots__ = ()

    def __new__(cls, stage: int) -> int:  # type: ignore[misc]  # returns the number in its place
        if type(stage) is not int:
            raise TypeError("ZeRO stage is no number")
        return stage


class TensorType(Opaque):
    """Stand-in for the class `Tensor`, which pickles of tensors with attributes name."""

    __slots__ = ()


class RebuildWithAttributes(Opaque):
    """Stand-in for `_rebuild_from_type_v2`: a plain tensor; the attributes that ZeRO-3 hangs on it are left off."""

    __slots__ = ()

    def __new__(cls, func: object, kind: object, args: tuple[object, ...], _state: object) -> StoredTensor:  # type: ignore[misc]  # returns the tensor
        if func not in (RebuildV2, RebuildV3) or kind is not TensorType:
            raise TypeError("tensor of an unknown class")
        rebuild: Callable[..., StoredTensor] = RebuildV2 if func is RebuildV2 else RebuildV3
        return rebuild(*args)


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
ZERO_GLOBALS: Allowed = MappingProxyType(
    {
        **TENSOR_GLOBALS,
        (_SCALERS, "LossScaler"): Opaque,
        (_SCALERS, "DynamicLossScaler"): Opaque,
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Stage,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): FragmentAddress,
        ("deepspeed.runtime.bf16_optimizer", "fragment_address"): FragmentAddress,  # before 0.8
        ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): Opaque,
        ("torch", "Tensor"): TensorType,
        ("torch._tensor", "_rebuild_from_type_v2"): RebuildWithAttributes,
        # client state
        ("argparse", "Namespace"): Opaque,
        ("builtins", "set"): Opaque,
        ("__builtin__", "set"): Opaque,
        ("numpy", "ndarray"): Opaque,
        ("numpy", "dtype"): Opaque,
        ("_codecs", "encode"): Opaque,
        **{(module, name): Opaque for module in _NUMPY for name in ("_reconstruct", "scalar")},
    }
)
