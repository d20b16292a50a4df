"""Which parameter an optimizer's tensor belongs to, and what it is of it.

A *slot* is what an optimizer keeps per parameter: a moment, a step count, a master copy. Checkpoints spell an entry in two ways: nested,
with the parameter's name as one component of the path, or flattened into one dotted text, where only the model's names tell how far the
parameter's goes (slots may be dotted too: `preconditioner.0`).

Source: torch 2.13, torch/distributed/checkpoint/state_dict.py (`flatten_optimizer_state_dict`); names of slots: torch/optim,
TransformerEngine FusedAdam, Megatron-LM distrib_optimizer.py.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from tasks.engine.formats.state_dict import Path, base_key, strip_wrappers

OPTIMIZER_KEYS = frozenset(
    {"optim", "optims", "optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict"}
)  # those of STATE_KEYS that hold an optimizer's entries

# A slot as saved → the word all formats share. Others keep their optimizer's own.
SLOTS: Mapping[str, str] = MappingProxyType(
    {
        "master_param": "master",  # TransformerEngine
        "master_params": "master",
        "fp32_param": "master",  # Megatron
    }
)


def slot_key(slot: str, parameter: str) -> str:
    """Return the key of a parameter's state tensor in `Catalog.state_tensors`.

    Args:
        slot: as the optimizer calls it.
        parameter: its FQN, without wrappers.

    Returns:
        `<slot>/<parameter>`, the slot in the word all formats share.
    """
    return f"{SLOTS.get(slot, slot)}/{parameter}"


def find_slot(path: Path, parameters: Collection[str]) -> str | None:
    """Return the key of an optimizer's entry.

    Args:
        path: its place in the state dict.
        parameters: the model's names without wrappers, to tell a flattened entry's parameter from its slot.

    Returns:
        `<slot>/<parameter>`; None when it is no optimizer's entry of a named parameter (integer ids name none).
    """
    depth = next((depth for depth, part in enumerate(path) if base_key(part) in OPTIMIZER_KEYS), None)
    if depth is None:
        return None
    rest = path[depth + 1 :]
    rest = rest[1:] if len(rest) > 1 and rest[0].isdigit() else rest  # a list of optimizers
    if len(rest) == 1:
        rest = tuple(rest[0].split(".", 1))
    if len(rest) < 2 or rest[0] != "state":
        return None
    name, slot = (rest[1], ".".join(rest[2:])) if len(rest) > 2 else _split(rest[1], parameters)
    return slot_key(slot, strip_wrappers(name)) if slot and not name.isdigit() else None


def _split(text: str, parameters: Collection[str]) -> tuple[str, str]:
    name, dot, slot = text.rpartition(".")
    while dot and strip_wrappers(name) not in parameters:
        name, dot, more = name.rpartition(".")
        slot = f"{more}.{slot}"
    if dot:
        return name, slot
    name, _, slot = text.rpartition(".")  # of a parameter the model has not, or has in another layout
    return name, slot
