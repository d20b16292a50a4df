"""What a run of Megatron-LM says of itself: `args` in its checkpoints, read through a closed list, and the layout they state.

`args` is the run's argparse namespace; no other file of a save says how it is cut. Names come and go by version, so each is looked up
under all that it had. Classes of Megatron's own packages (enums, mostly) stand for nothing: no reader looks into them.

Refused: arguments that change how weights are laid out in a way this product has no rule for (UNREAD).

Source: Megatron-LM core 0.12 to main (August 2026), megatron/training/arguments.py, checkpointing.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Self

from reports.errors import FormatError, name_some
from tasks.engine.containers.pickles import Allowed, Global, Opaque
from tasks.engine.containers.state_pickle import STATE_GLOBALS

REMEDY = "Restore the files of all ranks, of this one save, or export another step."
_CLASS = re.compile(r"[A-Z]\w*")


class Arguments:
    """Stand-in for `argparse.Namespace`: its values by name."""

    __slots__ = ("values",)
    values: Mapping[str, object]

    def __new__(cls, *_: object) -> Self:
        made = super().__new__(cls)
        made.values = {}
        return made

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("arguments that are no names and values")
        self.values = dict(state)


class Member(Opaque):
    """Stand-in for `getattr`, by which some Pythons pickle a member of an enum; of anything but an opaque class it is refused."""

    __slots__ = ()

    def __new__(cls, owner: object, _name: object) -> Opaque:  # type: ignore[misc]  # returns the member in its place
        if owner is not Opaque:
            raise TypeError("getattr of something else than an enum")
        return Opaque()


class MegatronGlobals(Mapping[Global, object]):
    """The closed list of Megatron's pickles: a table, and the classes of the packages `megatron.*`, each an Opaque.

    Args:
        table: everything else they name.
    """

    def __init__(self, table: Allowed) -> None:
        self._table = table

    def __getitem__(self, key: Global) -> object:
        module, name = key
        if module.startswith("megatron.") and _CLASS.fullmatch(name):
            return Opaque
        return self._table[key]

    def __iter__(self) -> Iterator[Global]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


MEGATRON_GLOBALS: Allowed = MegatronGlobals(
    MappingProxyType(
        {
            **STATE_GLOBALS,
            ("argparse", "Namespace"): Arguments,
            ("signal", "Signals"): Opaque,
            ("builtins", "getattr"): Member,
            ("__builtin__", "getattr"): Member,
            ("types", "SimpleNamespace"): Opaque,
            ("pathlib", "PosixPath"): Opaque,
            ("pathlib._local", "PosixPath"): Opaque,
            ("builtins", "set"): Opaque,
            ("__builtin__", "set"): Opaque,
            ("_io", "BytesIO"): Opaque,  # `_extra_state` of Transformer Engine
        }
    )
)

# Argument → values that leave the layout alone, and what another value does. An argument the run has not is harmless.
UNREAD: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "gtp_weight_remat_size": ((None, 1), "weights are cut once more along their rows"),
        "expert_gtp_weight_remat_size": ((None, 1), "experts are cut once more along their rows"),
        "moe_mlp_glu_interleave_size": ((None,), "gate and up rows of experts alternate"),
        "moe_shared_expert_glu_interleave_size": ((None,), "gate and up rows of the shared expert alternate"),
        "moe_latent_size": ((None,), "experts work in a latent space"),
        "rotary_interleaved": ((None, False), "Q and K rows are rotary pairs"),
        "attention_output_gate": ((None, False), "an output gate lies between Q and K rows"),
        "linear_attention_freq": ((None,), "some layers have linear attention"),
        "heterogeneous_layers_config_path": ((None,), "layers differ in kind"),
        "heterogeneous_layers_config_encoded_json": ((None,), "layers differ in kind"),
        "layernorm_zero_centered_gamma": ((None, False), "norm weights are stored minus one"),
        "apply_layernorm_1p": ((None, False), "norm weights are stored minus one"),
        "apply_residual_connection_post_layernorm": ((None, False), "residuals branch off behind the norms"),
    }
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run was cut. `etp` are the tensor-parallel ranks of experts; `world` is 0 where args do not say."""

    tp: int
    pp: int
    ep: int
    etp: int
    cp: int
    world: int
    num_layers: int
    num_experts: int

    def difference(self, other: "Layout") -> str:
        """Return where two layouts differ, as "tp 2 and 4"; "" where they do not.

        Args:
            other: of another rank.

        Returns:
            The first field that differs.
        """
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return next((f"{name} {ours} and {theirs}" for name, ours, theirs in pairs if ours != theirs), "")


# Field of Layout → the names it had, and its value where args lack it or say None.
_SIZES: Mapping[str, tuple[tuple[str, ...], int]] = MappingProxyType(
    {
        "tp": (("tensor_model_parallel_size", "model_parallel_size"), 1),
        "pp": (("pipeline_model_parallel_size",), 1),
        "ep": (("expert_model_parallel_size",), 1),
        "etp": (("expert_tensor_parallel_size",), 0),  # as many as tp
        "cp": (("context_parallel_size",), 1),
        "world": (("world_size",), 0),
        "num_layers": (("num_layers", "encoder_num_layers"), 0),
        "num_experts": (("num_experts", "num_moe_experts"), 0),
    }
)


def read_layout(args: Mapping[str, object], where: str) -> Layout:
    """Return how a run was cut.

    Args:
        args: its arguments.
        where: the file, for messages.

    Returns:
        The sizes of its parallel axes, layers and experts.

    Raises:
        FormatError: a size is no count, experts do not divide, or an argument of UNREAD is set.
    """
    unread = [f"{name}={args[name]!r} ({why})" for name, (harmless, why) in UNREAD.items() if args.get(name) not in harmless]
    if unread:
        raise FormatError(
            f"the run's arguments lay weights out in a way that no rule of this product describes: {name_some(unread)}",
            where=where,
            remedy="Export it with Megatron's own tools.",
        )
    sizes = {field: _count(args, names, default, where) for field, (names, default) in _SIZES.items()}
    sizes["etp"] = sizes["etp"] or sizes["tp"]
    if sizes["num_experts"] % sizes["ep"]:
        raise FormatError(f"{sizes['num_experts']} experts do not divide over ep={sizes['ep']}", where=where, remedy=REMEDY)
    return Layout(**sizes)


def _count(args: Mapping[str, object], names: tuple[str, ...], default: int, where: str) -> int:
    name = next((name for name in names if args.get(name) is not None), None)
    if name is None:
        return default
    value = args[name]
    if type(value) is not int or value < 1:
        raise FormatError(f"args.{name} is {value!r}, not a count", where=where, remedy=REMEDY)
    return value
